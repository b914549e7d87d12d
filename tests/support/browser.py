"""A real browser without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers have no user namespaces
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)
PAGE_TIMEOUT_S = 120


@contextmanager
def browsing(profile: Path) -> Iterator[webdriver.Chrome]:
    """Chromium with an empty profile. Without Debian's two packages the test is skipped."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian's packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        window.set_page_load_timeout(PAGE_TIMEOUT_S)
        yield window
    finally:
        window.quit()
