# SPDX-License-Identifier: Apache-2.0
"""The page for people: what it shows, to whom, and what it does, in a browser; screenshots are kept as artefacts."""

import json
import os
import pathlib
import re
import sys

import pytest

from browser import CHROMIUM, Browser
from conftest import ROOT, until

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "system"))
from protocol_client import Client  # noqa: E402  pylint: disable=wrong-import-position

STATE = "/v2/shmbroker/state"
SCRIPT = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
# where screenshots are kept; nowhere unless it is said
ARTEFACTS = os.environ.get("SHMBROKER_ARTEFACTS")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
ROWS = "[...document.querySelectorAll('#regions tbody tr')]"
NAMES = ROWS + ".map(row => row.querySelector('.name').textContent)"
# what is wider than the page, which is then to be scrolled sideways
OVERFLOW = ("Math.max(...[document.documentElement, ...document.querySelectorAll('.wide, tbody td')]"
            ".map(box => box.scrollWidth - box.clientWidth))")


@pytest.fixture
def state(gateway):
    """Reads the document that the page shows."""
    def read(**how):
        reply = gateway.get(STATE, **how)
        assert reply.status == 200, reply
        return reply.json

    return read


@pytest.fixture
def regions(gateway, key):
    """Some, of several sizes, one with a name that is markup."""
    made = {"camera-front": 6 << 20, "camera-rear": 6 << 20, "detections": 65536, "lidar/points": 24 << 20, SCRIPT: 4096,
            "audio": 192000}
    for i, (name, size) in enumerate(made.items()):
        assert gateway.register(name, key(f"region-{i}", size), size).status == 200
    return made


@pytest.fixture
def browser():
    one = Browser()
    yield one
    one.close()


@pytest.fixture
def page(browser, gateway, regions):
    """The page with all regions in it."""
    browser.open(f"http://{gateway.http}/")
    browser.until(f"{ROWS}.length === {len(regions)}", "the regions")
    return browser


def test_the_document(gateway, regions, state):
    shown = state()
    by_name = {region["name"]: region for region in shown["regions"]}
    assert {name: region["size"] for name, region in by_name.items()} == regions
    audio = by_name["audio"]
    assert audio["state"] == "active" and audio["kind"] == "system" and audio["unsealed"] and audio["kept"]
    assert audio["key"].startswith("/shmg-") and audio["may_unregister"] and audio["leases"] == 0
    assert audio["uid"] == os.geteuid() and isinstance(audio["generation"], str)
    assert shown["stats"]["regions"] == len(regions)
    assert shown["stats"]["held_bytes"] == sum(regions.values())
    assert shown["accounts"][str(os.geteuid())]["held_regions"] == len(regions)
    assert int(shown["info"]["quota_regions"]) > 0 and not shown["truncated"]
    assert any(client["pid"] == gateway.process.pid for client in shown["clients"])


def test_methods_and_headers(gateway):
    for path in ("/", STATE):
        reply = gateway.post(path)
        assert (reply.status, reply.headers["allow"]) == (405, "GET")
    reply = gateway.get("/")
    assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store" and reply.headers["x-frame-options"] == "DENY"
    assert gateway.get(STATE).headers["cache-control"] == "no-store"


def test_the_policy_lets_only_this_page_run(gateway):
    """Each time with another nonce, which is that of the page."""
    nonces = set()
    for _ in range(2):
        reply = gateway.get("/")
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] and "unsafe" not in str(policy)
        nonce = re.fullmatch("'nonce-([0-9a-f]{32})'", policy["script-src"])[1]
        text = reply.body.decode()
        assert re.findall('nonce="([^"]*)"', text) == [nonce, nonce]
        nonces.add(nonce)
        # nothing from elsewhere
        assert not re.search(r'(src|href)="(?!data:)', text) and "@import" not in text and "url(" not in text
        assert "innerHTML" not in text and "@NONCE@" not in text
    assert len(nonces) == 2


class TestLookingOnly:
    """Where clients may not register they may not unregister."""

    @pytest.fixture
    def options(self):
        return []

    def test_nothing_may_be_unregistered(self, gateway, state):
        assert gateway.broker.ctl("register", "--create=4K", "--keep", "native").returncode == 0
        (region,) = state()["regions"]
        assert region["name"] == "native" and not region["may_unregister"]
        gateway.broker.ctl("unregister", "native")


class TestCredentials:
    @pytest.fixture
    def options(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("correct-horse-battery\nadmin staple-of-the-administrator\n")
        return ["--allow-client-shm", "--token-file", path]

    def test_the_page_and_the_document_need_one(self, gateway):
        for path in ("/", STATE):
            assert gateway.get(path).status == 401
            assert gateway.get(path, headers={"Authorization": "Bearer correct-horse-battery"}).status == 200

    @needs_browser
    @pytest.mark.parametrize("user, headers", [("", {"Authorization": "Bearer correct-horse-battery"}),
                                               ("me:correct-horse-battery@", {})])
    def test_the_page_works_with_it(self, gateway, browser, user, headers):
        browser.open(f"http://{user}{gateway.http}/", headers=headers)
        browser.until("document.getElementById('health').textContent === 'broker is up'")


@pytest.mark.skipif(not ROOT, reason="needs root, for several uids")
class TestOthers:
    """What other users' processes are is told to administrators only, whatever the gateway is told."""

    @pytest.fixture
    def options(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("correct-horse-battery\nadmin staple-of-the-administrator\n")
        return ["--allow-client-shm", "--token-file", path]

    def test_others_are_not_shown(self, gateway, state):
        tool = gateway.place.start("shmbrokerctl", "-s", gateway.broker.socket, "register", "--create=4K", "other's",
                                   uid=20013, log=gateway.directory / "tool")
        try:
            until(lambda: gateway.broker.regions(), "the region")
            seen = {}
            for who in ("correct-horse-battery", "staple-of-the-administrator"):
                shown = state(headers={"Authorization": f"Bearer {who}"})
                (seen[who],) = shown["regions"]
                told = {client["uid"] for client in shown["clients"]}
                assert (20013 in told) == ("20013" in shown["accounts"]) == who.startswith("staple")
            assert seen["staple-of-the-administrator"]["uid"] == 20013
            assert seen["staple-of-the-administrator"]["pid"] == tool.pid
            hidden = seen["correct-horse-battery"]
            assert (hidden["uid"], hidden["pid"], hidden["comm"]) == (None, None, None)
            assert hidden["name"] == "other's" and not hidden["may_unregister"]
        finally:
            tool.terminate()
            tool.wait()


@needs_browser
class TestPage:
    def test_it_shows_what_there_is_and_complains_about_nothing(self, page, gateway, regions):
        assert sorted(page.run(NAMES)) == sorted(regions)
        assert page.run("document.getElementById('n-regions').textContent") == str(len(regions))
        assert page.run("document.getElementById('health').textContent") == "broker is up"
        assert "36" in page.run("document.getElementById('n-bytes').textContent")
        # names are text
        assert page.run("document.title") == "shmbroker"
        assert page.run("document.querySelectorAll('main img, main script').length") == 0
        assert "can truncate" in page.run("document.getElementById('warnings').textContent")
        assert page.run("document.getElementById('n-leases').textContent") == "0"
        assert f"uid {os.geteuid()}" in page.run("document.getElementById('owners').tBodies[0].textContent")
        assert f"pid {gateway.process.pid}" in page.run("document.getElementById('clients').tBodies[0].textContent")
        assert page.run("document.getElementById('chart').querySelector('.line').getAttribute('d')").startswith("M")
        assert {url.split("/")[2] for url in page.requests if not url.startswith("data:")} == {gateway.http}
        assert page.complaints == []

    def test_it_sorts_and_filters(self, page, regions):
        def click(column):
            page.run(f"document.querySelectorAll('#regions th button')[{column}].click()")
            return page.run(NAMES)

        by_size = [name for name, _ in sorted(regions.items(), key=lambda item: item[1])]
        assert [regions[name] for name in click(4)] == sorted(regions.values(), reverse=True)
        assert click(4)[0] == by_size[0] and page.run(NAMES)[-1] == by_size[-1]
        assert page.run("document.querySelector('#regions th[aria-sort]').getAttribute('aria-sort')") == "ascending"

        def type_in(text):
            page.run(f"(field => {{ field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')); }})"
                     "(document.getElementById('filter'))")
            return sorted(page.run(NAMES))

        assert type_in("camera") == ["camera-front", "camera-rear"]
        assert type_in("CAMERA rear") == ["camera-rear"]
        assert type_in("nothing like this") == []
        assert page.run("document.getElementById('no-regions').textContent") == "No region matches the filter."
        assert len(type_in("")) == len(regions)

    def test_it_unregisters_after_a_question(self, page, gateway, regions):
        def press(name):
            page.run(f"{ROWS}.find(row => row.querySelector('.name').textContent === {json.dumps(name)})"
                     ".querySelector('button.danger').click()")
            assert page.run("document.getElementById('confirm').open")
            assert name in page.run("document.getElementById('confirm-text').textContent")

        press("audio")
        page.run("document.getElementById('confirm-no').click()")
        assert not page.run("document.getElementById('confirm').open")
        assert len(gateway.broker.regions()) == len(regions)
        for name in ("lidar/points", SCRIPT):
            press(name)
            page.run("document.getElementById('confirm-yes').click()")
            page.until(f"!{NAMES}.includes({json.dumps(name)})", "the end of the region")
        assert len(gateway.broker.regions()) == len(regions) - 2
        assert page.complaints == []

    def test_it_says_that_the_broker_is_away_and_back(self, page, gateway):
        gateway.broker.kill()
        page.until("document.getElementById('health').classList.contains('bad')")
        gateway.broker.start()
        page.until("document.getElementById('health').textContent === 'broker is up'")

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
    def test_it_fits_and_can_be_read(self, browser, gateway, regions, width, dark):
        browser.open(f"http://{gateway.http}/", width=width, height=844, dark=dark)
        browser.until(f"{ROWS}.length === {len(regions)}", "the regions")
        assert browser.run(OVERFLOW) <= 0
        channels = browser.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
        assert (sum(channels) < 3 * 128) == dark
        # the button has the last word
        for wanted in ("light", "dark"):
            browser.run("document.getElementById('theme').click()")
            channels = browser.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
            assert (sum(channels) < 3 * 128) == (wanted == "dark")
        browser.run("document.getElementById('theme').click()")
        if ARTEFACTS:
            browser.screenshot(pathlib.Path(ARTEFACTS) / f"dashboard-{width}-{'dark' if dark else 'light'}.png")


@needs_browser
class TestWarnings:
    @pytest.fixture
    def broker_config(self):
        return "unsealed = accept\n[quota]\nregions = 7\n"

    def test_of_a_quota_and_of_a_region_that_does_not_go(self, page, gateway):
        """The clock of the page is set forward: it counts from when it saw the region retiring."""
        text = "document.getElementById('warnings').textContent"
        page.until(f"{text}.includes('uid {os.geteuid()} holds 6 of 7 regions')")
        with Client(gateway.broker.socket) as consumer:
            consumer.hello()
            consumer.lookup("audio")
            assert gateway.region("system", "audio", "unregister").status == 200
            page.until(f"{ROWS}.some(row => row.textContent.includes('lazy'))", "the region that is retiring")
            assert page.run("document.getElementById('n-leases').textContent") == "1"
            assert "audio" not in page.run(text)
            page.run("void (Date.now = (now => () => now() + 3 * 60000)(Date.now))")
            page.until(f"{text}.includes('audio waits for 1 lease since more than 3 min')")
        page.until(f"!{NAMES}.includes('audio')", "its end")
        assert page.complaints == []
