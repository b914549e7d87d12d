"""The console page: a chat and a live view of the batch, plain files that every gateway serves at `/`."""
