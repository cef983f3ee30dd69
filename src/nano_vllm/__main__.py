"""`python -m nano_vllm` is the command `nano-vllm`."""

import sys

from .cli import main

sys.exit(main())
