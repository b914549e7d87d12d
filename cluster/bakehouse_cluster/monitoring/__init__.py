"""What is watched of a cluster: dashboards, recorded series and alerts, all over the metrics of the one table."""
