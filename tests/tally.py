# SPDX-License-Identifier: Apache-2.0
"""Adds up what the groups of `tools/quickstart check` left in RESULTS and prints it, the sum as the last line.

RESULTS/GROUP/parts names the parts that the group must have; a part without a single result is a failure:
  steps   lines of "pass|fail|skip TAB id [TAB why]"
  unit    the .trs and .log files of automake's test driver; the tests of a cmocka program are counted one by one
  system  JUnit XML of pytest, in system.xml
  python  the same, in python.xml
  gateway the same, in gateway.xml
A skip is a failure too unless a line "PATTERN reason" of the file of expected skips has it; * in PATTERN stands
for any text, and ids are GROUP:PROGRAM::TEST. A reason that begins with "needs root" is none for root.
"""

import argparse
import os
import pathlib
import re
import sys
import xml.etree.ElementTree

PASS, FAIL, SKIP = "pass", "fail", "skip"
WHY_MAX = 300
CMOCKA = {"       OK ": PASS, "  FAILED  ": FAIL, "  ERROR   ": FAIL, "  SKIPPED ": SKIP}


def steps(directory):
    path = directory / "steps"
    for line in path.read_text().splitlines() if path.exists() else ():
        result, name, *why = line.split("\t")
        yield name, result, "".join(why)


def unit(directory):
    root = directory / "unit"
    for trs in sorted(root.rglob("*.trs")):
        name = str(trs.relative_to(root).with_suffix(""))
        found = re.search(r"^:global-test-result: (\w+)", trs.read_text(), re.M)
        result = {"PASS": PASS, "SKIP": SKIP}.get(found and found[1], FAIL)
        log = trs.with_suffix(".log").read_text(errors="replace")
        # cmocka's summary names failed and skipped tests a second time, hence the dict
        cases = {}
        for mark, case in re.findall(r"^\[(       OK |  FAILED  |  ERROR   |  SKIPPED )\] ([\w ()]+)$", log, re.M):
            cases[case.replace(" ", "_")] = CMOCKA[mark]
        for case, outcome in cases.items():
            yield f"{name}::{case}", outcome, ""
        if not cases or (result == FAIL and FAIL not in cases.values()):
            why = log.strip().splitlines()
            yield name, result, why[-1] if why else ""


def system(directory, file="system.xml"):
    path = directory / file
    for case in xml.etree.ElementTree.parse(path).iter("testcase") if path.exists() else ():
        name = f'{case.get("classname", "").replace(".", "/")}::{case.get("name")}'
        failures = [found for kind in ("failure", "error") if (found := case.find(kind)) is not None]
        if failures:
            yield name, FAIL, failures[0].get("message", "").partition("\n")[0]
        elif case.find("skipped") is not None:
            yield name, SKIP, case.find("skipped").get("message", "")
        else:
            yield name, PASS, ""


def python(directory):
    return system(directory, "python.xml")


def gateway(directory):
    return system(directory, "gateway.xml")


PARTS = {"steps": steps, "unit": unit, "system": system, "python": python, "gateway": gateway}


def expected_skips(path):
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern, _, reason = line.partition(" ")
        if not reason.strip():
            sys.exit(f"{path}: no reason for {pattern}")
        if os.geteuid() == 0 and reason.startswith("needs root"):
            continue
        yield re.compile(".*".join(map(re.escape, pattern.split("*")))), reason.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--expected", type=pathlib.Path, required=True)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("groups", nargs="+")
    options = parser.parse_args()
    expected = list(expected_skips(options.expected))
    total = {PASS: 0, FAIL: 0, SKIP: 0}

    for group in options.groups:
        count = dict.fromkeys(total, 0)
        directory = options.results / group
        for part in (directory / "parts").read_text().split():
            ran = False
            for name, result, why in PARTS[part](directory):
                name = f"{group}:{name}"
                if result == SKIP:
                    reason = next((reason for pattern, reason in expected if pattern.fullmatch(name)), None)
                    if reason:
                        print(f"skipped: {name}: {reason}")
                    else:
                        print(f"FAILED: {name}: this skip is not expected: {why}")
                        result = FAIL
                elif result == FAIL:
                    print(f"FAILED: {name}{': ' + why[:WHY_MAX] if why else ''}")
                count[result] += 1
                ran = ran or result != SKIP
            if not ran:
                print(f"FAILED: {group}: {part}: nothing ran")
                count[FAIL] += 1
        print(f"{group}: {count[PASS]} passed, {count[FAIL]} failed, {count[SKIP]} skipped")
        for result in total:
            total[result] += count[result]

    print(f"{total[PASS]} passed, {total[FAIL]} failed, {total[SKIP]} skipped")
    return 1 if total[FAIL] or not total[PASS] else 0


if __name__ == "__main__":
    sys.exit(main())
