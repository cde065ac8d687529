"""The score of the fault suite, printed when all tests are done."""

SCORE = {"injected": {}, "recorded": {}, "not injected here": {}}            # kind -> {class or claim: right, or why not}


def pytest_unconfigure():
    """After pytest's own last line, so that the score is the end of the output."""
    if not any(SCORE.values()):
        return
    for kind in ("injected", "recorded"):
        right = sorted(key for key, good in SCORE[kind].items() if good)
        wrong = sorted(set(SCORE[kind]) - set(right))
        print(f"classes right / {kind}: {len(right)} / {len(SCORE[kind])}" + (f"   wrong: {', '.join(wrong)}" if wrong else ""))
    for key, why in SCORE["not injected here"].items():
        print(f"not injected here: {key}: {why}")
