"""Files of a trial's folder."""

from __future__ import annotations

from pathlib import Path

from dsat.engines.trial_folder import follow


def test_a_log_is_followed_also_through_half_a_letter(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    texts = follow(log)
    assert next(texts) == ""
    letter = "ü".encode()
    with open(log, "ab", buffering=0) as file:
        file.write(b"loss 1\n" + letter[:1])
        assert next(texts) == "loss 1\n"
        file.write(letter[1:])
        assert [next(texts), next(texts)] == ["ü", ""]
