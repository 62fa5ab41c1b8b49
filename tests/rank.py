"""One of the ranks that `Ranks` calls: python -m tests.rank DESCRIPTOR."""

import sys
from multiprocessing.connection import Connection

from tests.ranks import serve

if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
