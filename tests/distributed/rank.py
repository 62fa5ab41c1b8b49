"""One of the ranks that `Ranks` calls: python -m tests.distributed.rank DESCRIPTOR."""

import sys
from multiprocessing.connection import Connection

from tests.distributed.conftest import serve

if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
