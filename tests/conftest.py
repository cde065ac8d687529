"""The score of the fault suite, printed when all tests are done."""

SCORE = {"injected": {}, "recorded": {}, "not injected here": {}}            # kind -> {class or claim: right, or why not}


def pytest_terminal_summary(terminalreporter):
    if not any(SCORE.values()):
        return
    terminalreporter.section("faults")
    for kind in ("injected", "recorded"):
        right = sorted(key for key, good in SCORE[kind].items() if good)
        wrong = sorted(set(SCORE[kind]) - set(right))
        terminalreporter.write_line(f"classes right / {kind}: {len(right)} / {len(SCORE[kind])}" + (f"   wrong: {', '.join(wrong)}" if wrong else ""))
    for key, why in SCORE["not injected here"].items():
        terminalreporter.write_line(f"not injected here: {key}: {why}")
