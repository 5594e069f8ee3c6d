"""The node's command line: `python -m node broker|nameserver`, or `python3.11 node.pyz ...`.

Exit status: 0 after an orderly end (SIGTERM, SIGINT); 254 when the operator has to fix something (options,
configuration, a port in use, no permission); 1 when the node itself cannot go on (a damaged store). Either way each
problem is one line on stderr, without a traceback.
"""

from __future__ import annotations

import sys

from node.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
