"""Runs the DDP tests for CPU that ship inside the installed torch, on our engine.

    python tests/python/torch_suite.py [name of a test ...]

The class is patched before torch's test module is imported, here and in every rank that its tests spawn. Ends with a
line "N passed, N failed, N skipped" and exit status 1 when a test failed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest

if __name__ == "__main__":  # ranks import this file as __mp_main__ and inherit the environment
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch_suite_"))
    for folder in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)

import lockstep

lockstep.install()

from torch.testing._internal.distributed import distributed_test  # noqa: E402

#: Those about DDP that need no GPU; the others would be skipped after starting processes for nothing.
CPU_TESTS = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_dump_DDP_relevant_env_vars",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
]


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def main() -> int:
    tests = unittest.TestSuite(TorchSuite(name) for name in sys.argv[1:] or CPU_TESTS)
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    failed = len(result.failures) + len(result.errors)
    skipped = len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
