"""python -m tilestone"""

import sys

from tilestone._cli import main

sys.exit(main())
