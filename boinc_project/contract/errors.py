"""The faults of the contract, told apart by who must act.

InvalidResult    the volunteer's file is wrong: the result is judged invalid
TransientError   storage or network is away: try the same thing later, judge nothing
UnfitHost        this computer cannot do this work: stop sending it there (TooLittleMemory: unless parts of it fit)
anything else    is our own bug and stops the program with a traceback
"""

from __future__ import annotations


class ContractError(ValueError):
    """A graph, tensor file, microtask or update breaks the contract.

    `fault` is a short stable name of what is wrong (`header_too_long`, `missing_tensor`, ...), for
    logs and tests; the message is one sentence for a person.
    """

    def __init__(self, message: str, *, fault: str = "invalid") -> None:
        super().__init__(message)
        self.fault = fault


class InvalidResult(ContractError):
    """The file that a volunteer uploaded is not the result that the microtask asked for."""


class TransientError(Exception):
    """Something that should be there is away for now; the same step will be tried again later."""


class UnfitHost(Exception):
    """This computer cannot run this microtask (too little memory, no device); another one can."""


class TooLittleMemory(UnfitHost):
    """This computer or its device has too little memory for the work as it stands; a smaller batch may fit."""
