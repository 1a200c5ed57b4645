# SPDX-License-Identifier: Apache-2.0
"""What ``make dist`` writes beside a release's packages is in the formats that it names."""

import json
from pathlib import Path

import pytest

from tests.unit.test_provenance import PINS, _build, provenance, release  # noqa: F401


@pytest.mark.works_with("in-toto-attestation", "the provenance of a release: a statement, and SLSA's predicate")
def test_in_toto_reads_the_provenance_of_a_release(tmp_path: Path) -> None:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    root, files = release(tmp_path)
    written = json.loads(json.dumps(provenance(files, PINS, root)))
    # Both raise if there is a field that they do not know.
    statement = json_format.ParseDict(written, statement_pb2.Statement())
    Statement.copy_from_pb(statement).validate()
    predicate = json_format.ParseDict(written["predicate"], provenance_pb2.Provenance())
    assert json_format.MessageToDict(predicate) == written["predicate"]
    assert statement.predicate_type == "https://slsa.dev/provenance/v1"
