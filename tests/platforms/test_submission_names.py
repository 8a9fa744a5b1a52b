"""A run is called by its pipeline and by what identifies its submission."""

from rekindle.platforms.submission import Definition, digest_of, submission_name

DEFINITION = Definition({"digits.yaml": b"steps"})


def test_the_same_definition_and_token_give_the_same_name() -> None:
    name = submission_name("digits", DEFINITION, "a")
    assert name == f"digits-{digest_of(DEFINITION.files, 'a')}"
    others = {
        submission_name("digits", DEFINITION, "b"),
        submission_name("digits", Definition({"digits.yaml": b"other steps"}), "a"),
    }
    assert len(others - {name}) == 2


def test_the_name_of_the_pipeline_is_cut_and_never_the_digest() -> None:
    name = submission_name("nightly-digits", DEFINITION, "a", longest=8)
    assert name == f"nightly-{digest_of(DEFINITION.files, 'a')}", "and one dash is between them"
