"""Runs SeaweedFS in the present site: prints the variables that workers need, and serves until it is ended."""
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "break/chaos"))
from s3_server import BUCKET, S3Server

server = S3Server(Path(sys.argv[1]), sys.argv[2])
print(json.dumps({**server.environment(), "DILOCO_STORE": server.url(), "bucket": BUCKET}), flush=True)
signal.pause()
