"""One run over Spec-Bench's questions, saved after each, so that it can be interrupted and resumed."""

from collections.abc import Sequence
from pathlib import Path

from eesd.bench.measure.resumable import refuse_existing, run_with_progress
from eesd.bench.questions.measure import SAMPLINGS, Questioning, parse_method
from eesd.bench.questions.questions import read_questions
from eesd.bench.questions.results import Result
from eesd.common.checks import check_choice
from eesd.common.errors import EESDError


def answer_questions(
    directories: Sequence[Path],
    output: Path,
    resume: bool,
    overwrite: bool,
    *,
    questions: Path,
    methods: Sequence[str],
    samplings: Sequence[str],
    per_category: int,
    max_new_tokens: int,
    backend: str,
    threads: int | None,
) -> Result:
    """Answer the questions with every engine directory.

    Args:
        directories: Engine directories.
        output: The result file, of which ``resume`` continues and ``overwrite`` replaces an existing one.
        questions: Spec-Bench's ``question.jsonl``.
        methods: See :func:`~eesd.bench.questions.measure.parse_method`.
        samplings: Names in :data:`~eesd.bench.questions.measure.SAMPLINGS`.
        per_category: Largest number of questions of a category.
        max_new_tokens: Tokens of an answer, at most.
        backend: Of the engines.
        threads: CPU threads of an engine; None for the backend's default.

    Raises:
        EESDError: An option or a file is wrong, or the result to resume has other options.
    """
    for sampling in samplings:
        check_choice("A sampling", sampling, SAMPLINGS)
    for method in methods:
        parse_method(method)
    chosen = read_questions(questions, per_category)
    options = {"methods": [*methods], "samplings": [*samplings], "per_category": per_category}
    result = Result(options | {"max_new_tokens": max_new_tokens, "backend": backend, "threads": threads})
    if output.exists() and resume:
        stored = Result.load(output)
        if (stored.options, stored.machine) != (result.options, result.machine):
            raise EESDError(f"{output} was measured with other options or on another machine; use --overwrite.")
        result = stored
    elif not overwrite:
        refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for directory in directories:
        asked = Questioning(directory, backend, threads, methods, samplings, max_new_tokens)
        fitting = [question for question in chosen if asked.fits(question)]
        if not fitting:
            raise EESDError(f"No question leaves room for an answer in {directory}; export with a larger --max-seq-len.")
        result.categories |= {str(question.id): question.category for question in fitting}
        result.skipped = len(chosen) - len(fitting)
        run_with_progress(asked.name, asked.ask(fitting, result), lambda: result.save(output))
    result.complete = True
    result.save(output)
    return result
