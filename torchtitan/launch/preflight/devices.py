"""Checks this machine's GPUs for the preflight, in a process of its own."""

import json

from torchtitan.hardware import measure_matmul_flops


def print_device_checks() -> None:
    """Print, as JSON, whether each GPU here multiplies matrices correctly, and how fast."""
    import torch

    checks = []
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        torch.cuda.set_device(device)
        # bf16 holds whole numbers up to 256 exactly, so these sums of 256 products are exact in any order.
        a, b = (torch.randint(-1, 2, shape, device=device).bfloat16() for shape in ((8192, 256), (256, 8192)))
        by_product = (a @ b).double().sum(dim=1)
        exact = torch.equal(by_product, (a.double() @ b.double().sum(dim=1, keepdim=True)).squeeze(1))
        tflops = measure_matmul_flops(device, torch.bfloat16) / 1e12
        known = {"name": torch.cuda.get_device_name(i), "uuid": str(torch.cuda.get_device_properties(i).uuid)}
        checks.append({**known, "exact": exact, "tflops": tflops})
    print(json.dumps(checks))


if __name__ == "__main__":
    print_device_checks()
