"""`epruntime verify`: the invariance contract, checked on the user's own model and ranks.

requests.py what is asked -> cases.py what is varied -> session.py runs on ranks -> compare.py bit for bit
                                              run.py all of it -> report.py, against.py (transformers)
"""

from epruntime.config.verify import VerifyConfig
from epruntime.verify.report import VerifyReport
from epruntime.verify.run import verify

__all__ = ["VerifyConfig", "VerifyReport", "verify"]
