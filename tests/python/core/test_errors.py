from __future__ import annotations

import pickle

import pytest

from hororing import errors
from hororing._engine.core import error_for, lib


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (lib.HR_INVALID_ARGUMENT, (ValueError,)),
        (lib.HR_MISMATCH, (errors.MismatchError, errors.HororingInternalError, ValueError)),
        (lib.HR_DUPLICATE_NAME, (errors.DuplicateNameError, ValueError)),
        (lib.HR_NOT_INITIALIZED, (errors.NotInitializedError, RuntimeError, ValueError)),
        (lib.HR_SHUT_DOWN, (errors.ShutDownError, errors.HororingInternalError)),
        (lib.HR_PEER_LOST, (errors.PeerLostError, errors.HororingInternalError)),
        (lib.HR_STALLED, (errors.StalledError, errors.HororingInternalError)),
        (lib.HR_TRANSPORT, (errors.TransportError, errors.HororingInternalError)),
        (lib.HR_INTERNAL, (errors.HororingInternalError, RuntimeError)),
    ],
)
def test_every_code_of_the_core_has_its_exceptions(code: int, kinds: tuple[type, ...]):
    with pytest.raises(kinds[0], match="what happened") as caught:
        raise error_for(code, "what happened")
    assert all(isinstance(caught.value, kind) for kind in kinds)


def test_no_code_of_the_core_is_forgotten():
    codes = {getattr(lib, name) for name in dir(lib) if name.startswith("HR_")}
    for code in range(1, lib.HR_INTERNAL + 1):
        assert code in codes
        assert "unknown code" not in str(error_for(code, "text"))


def test_an_unknown_code_still_becomes_an_error():
    with pytest.raises(errors.HororingInternalError, match="unknown code 77"):
        raise error_for(77, "text")


def test_a_lost_peer_is_named():
    error = error_for(lib.HR_PEER_LOST, "rank 3 is gone", 3)
    assert isinstance(error, errors.PeerLostError)
    assert (error.rank, str(error)) == (3, "rank 3 is gone")


def test_horovods_name_is_an_alias():
    assert errors.HorovodInternalError is errors.HororingInternalError


def test_bad_arguments_are_not_what_elastic_training_recovers_from():
    assert not issubclass(errors.DuplicateNameError, errors.HororingInternalError)
    assert not issubclass(errors.HostsUpdatedInterrupt, errors.HororingInternalError)


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerLostError("gone", 2),
        errors.HostsUpdatedInterrupt(True),
        errors.NotInitializedError(),
        errors.MismatchError("shapes differ"),
    ],
)
def test_exceptions_survive_pickling(error: Exception):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_not_initialized_says_what_to_do():
    assert "has not been initialized; use hvd.init()." in str(errors.NotInitializedError())
