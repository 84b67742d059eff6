"""Names that client and server share outside the messages: metadata keys and the service's name."""

from __future__ import annotations

SERVICE = "epruntime.v1.Inference"

#: Trailing metadata of a failed call (the request id is also in the initial metadata of Generate).
ERROR = "epruntime-error"
FIELD = "epruntime-field"
RETRY_AFTER_MS = "epruntime-retry-after-ms"
#: gRPC's own names for the same: for the retry policy of gRPC libraries, and a google.rpc.Status with RetryInfo.
RETRY_PUSHBACK_MS = "grpc-retry-pushback-ms"
STATUS_DETAILS = "grpc-status-details-bin"
RANK = "epruntime-rank"
HOST = "epruntime-host"
REQUEST_ID = "epruntime-request-id"

#: Metadata of a call that brings an access token: "Bearer TOKEN" (RFC 6750).
AUTHORIZATION = "authorization"
