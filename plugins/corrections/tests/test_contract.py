"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

from slime_testing_contracts import suites

CORRECTIONS = {
    "mis": {
        "args": {
            "tis_level": "sequence",
            "tis_mode": "mask",
            "tis_batch_normalize": True,
            "use_rs": True,
            "rs_level": "geometric",
            "rs_veto_threshold": 0.1,
            "rs_trust_region": "avg",
            "rs_tr_threshold": 1.0,
        }
    },
}


globals().update(suites("corrections", "slime_corrections", CORRECTIONS, globals()))
