"""What `make demo` shows: pseudo-labels of a few images over some epochs, and how consistent each image is."""

import torch

import pcsr_fast as pf


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images, classes, epochs = 5, 8, 20
    state = pf.TallyState.zeros(images, classes)
    # image i has a favourite class and noise that grows with i: the first is always labelled alike, the last at random
    favourite = torch.eye(classes)[torch.randint(classes, (images,), generator=generator)] * 4
    noise = torch.linspace(0, 4, images)[:, None]
    for _ in range(epochs):
        logits = favourite + noise * torch.randn(images, classes, generator=generator)
        pf.tally(logits, torch.arange(images), state)
    print(f"\n{epochs} epochs of pseudo-labels, counted by pf.tally:")
    print("image  noise  counts per class" + " " * 12 + "PCS")
    for i in range(images):
        counts = " ".join(f"{c:2}" for c in state.counts[i].tolist())
        print(f"{i:5}  {noise[i, 0]:5.1f}  {counts}    {int(state.pcs()[i]):3}")

    scores = torch.rand(4, 4, generator=generator, requires_grad=True)
    loss = pf.triplet(scores, pf.adaptive_margin(torch.tensor([1.0, 0.9, 0.5, 0.1])))
    loss.backward()
    print(f"\npf.triplet of 4 x 4 scores with adaptive margins: {loss:.3f}, gradient:\n{scores.grad}")


if __name__ == "__main__":
    main()
