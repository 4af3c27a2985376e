"""`python -m tandem.ops.native`: compile the kernels now; exit status 1 where that fails."""

import sys

from tandem import log
from tandem.ops.native.build import NativeBuildError, build_library
from tandem.ops.native.library import open_library


def main() -> int:
    log.configure()
    try:
        open_library(str(build_library()))
    except (NativeBuildError, OSError) as error:
        log.get_logger("tandem.ops.native").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
