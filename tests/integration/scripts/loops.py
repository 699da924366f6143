"""Loops of many kinds, each with what it takes to go on by itself: `loops.py KIND`. Three optimizer steps a kind and round."""

import dataclasses
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROUNDS = 6
Rounds = Iterator[int]


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor
    about: dict[str, Any]


class Saved:
    """Objects with a state, saved every second round with the random stream, and loaded where there is something to load."""

    def __init__(self, **items: Any) -> None:
        rank = os.environ.get("RANK", "0")
        self._path = Path(os.environ["CHAOSRUN_OUTPUT"]) / f"saved-{rank}.pt"
        self._items = items

    def rounds(self, save: bool = True) -> Rounds:
        done = 0
        if self._path.exists():
            state = torch.load(self._path, weights_only=False)
            done = state["done"]
            for name, item in self._items.items():
                item.load_state_dict(state[name])
            torch.set_rng_state(state["rng"])
        for number in range(done, ROUNDS):
            yield number
            if number % 2 and save:
                state = {name: item.state_dict() for name, item in self._items.items()}
                torch.save({**state, "done": number + 1, "rng": torch.get_rng_state()}, f"{self._path}.new")
                os.replace(f"{self._path}.new", self._path)


def data(number: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + 10 * part + int(os.environ.get("RANK", 0)))
    return torch.randn(6, 8, generator=generator)


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8), *more)


def update(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gan() -> None:
    generator, judge = net(), net(nn.Linear(8, 1))
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
    for number in Saved(generator=generator, judge=judge, first=first, second=second).rounds():
        second.zero_grad()
        judge(data(number)).mean().backward()
        fake = generator(data(number, 1))
        (-judge(fake.detach()).mean()).backward()
        second.step()
        first.zero_grad()
        judge(fake).mean().backward()
        first.step()


def two_optimizers() -> None:
    model = net()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(model[3].parameters())
    for number in Saved(model=model, first=first, second=second).rounds():
        model(data(number)).square().mean().backward()
        update(first, second)


def built_after_a_pass() -> None:
    """When the second model is built, whose spectral norm makes a pass, there is an optimizer already."""
    generator = net()
    first = torch.optim.Adam(generator.parameters())
    judge = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))
    second = torch.optim.Adam(judge.parameters())
    for number in Saved(generator=generator, judge=judge, first=first, second=second).rounds():
        judge(generator(data(number))).square().mean().backward()
        update(first, second)


class Late:
    """An optimizer that is made, and given its state, when it is first asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._state = model, dict[str, Any]()
        self.made: torch.optim.Optimizer | None = None

    def get(self) -> torch.optim.Optimizer:
        if self.made is None:
            self.made = torch.optim.Adam(self._model.parameters())
            if self._state:
                self.made.load_state_dict(self._state)
        return self.made

    def state_dict(self) -> dict[str, Any]:
        return self.get().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def made_at_the_first_step(*, before_backward: bool = False) -> None:
    model = net()
    late = Late(model)
    for number in Saved(model=model, late=late).rounds():
        loss = model(data(number)).square().mean()
        if before_backward:
            late.get()
        loss.backward()
        update(late.get())


def made_before_backward() -> None:
    made_at_the_first_step(before_backward=True)


def replaced_after_a_pass() -> None:
    """When the model makes a pass that leads to nothing, an earlier optimizer lives, and one of its own does not yet. What is
    dropped then is freed at once."""
    gc.disable()
    earlier = net()
    dropped = weakref.ref(earlier)
    optimizer = torch.optim.Adam(earlier.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = net()
    head = torch.optim.Adam(model[3].parameters())
    model(data(0))
    del earlier
    optimizer = torch.optim.Adam(model[0].parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for number in Saved(model=model, head=head, optimizer=optimizer, schedule=schedule).rounds():
        model(data(number)).square().mean().backward()
        update(head, optimizer)
        schedule.step()
        assert dropped() is None


class BuiltInTurn:
    """An optimizer for each parameter of two modules, built when that is first stepped, in another order at each start: Pyro's
    parameters are a set."""

    def __init__(self, *modules: nn.Module) -> None:
        named = [
            (f"{number}.{name}", each) for number, module in enumerate(modules) for name, each in module.named_parameters()
        ]
        self._named = dict(sorted(named, key=lambda _: os.urandom(8)))
        self._built, self._state = dict[str, torch.optim.Optimizer](), dict[str, Any]()

    def step(self) -> None:
        for name, parameter in self._named.items():
            if name not in self._built:
                self._built[name] = torch.optim.AdamW([parameter], lr=1e-2)
                if self._state:
                    self._built[name].load_state_dict(self._state[name])
            self._built[name].step()
            self._built[name].param_groups[0]["lr"] *= 0.999  # as in its ClippedAdam

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._built.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def built_in_turn() -> None:
    """Weights that are changed behind a step are recorded as they were at its end."""
    model, guide = net(), nn.Linear(8, 8)
    optimizer = BuiltInTurn(model, guide)
    for number in Saved(model=model, guide=guide, optimizer=optimizer).rounds():
        model.zero_grad()
        guide.zero_grad()
        model(guide(data(number))).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)


class Trial:
    """A model and its optimizer, alive until the next garbage collection."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.itself = self


def tried_before() -> None:
    """What was tried before, and dropped, is freed at another moment by a restart."""
    gc.disable()
    Trial()
    if os.environ["CHAOSRUN_ATTEMPT"] != "1":
        gc.collect()
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for number in Saved(model=model, optimizer=optimizer, schedule=schedule).rounds():
        model(data(number)).square().mean().backward()
        update(optimizer)
        schedule.step()


def measured_at_each_start() -> None:
    """When its checkpoint is loaded, the model makes a pass that nothing is learnt from. A loss is of two over one batch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for turn, number in enumerate(Saved(model=model, optimizer=optimizer).rounds()):
        if turn == 0:
            with torch.random.fork_rng():
                model(torch.zeros(2, 8))
        (model(data(number)) - model(data(number))).square().mean().backward()
        update(optimizer)


def tried_at_each_start() -> None:
    """The same with the batch that is learnt from next, and with a stream that is restored after it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for turn, number in enumerate(Saved(model=model, optimizer=optimizer).rounds()):
        if turn == 0:
            stream = torch.get_rng_state()
            torch.manual_seed(8)
            model(data(number))
            torch.set_rng_state(stream)
        model(data(number)).square().mean().backward()
        update(optimizer)


def stepped_at_each_restart() -> None:
    """Before a checkpoint is loaded, the optimizer makes a step that changes no weights, to have state to load into."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    if os.environ["CHAOSRUN_ATTEMPT"] != "1":
        with torch.random.fork_rng():
            model(torch.ones(2, 8)).sum().backward()
            update(optimizer)
    saved = Saved(model=model, optimizer=optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for number in saved.rounds():
        model(data(number)).square().mean().backward()
        update(optimizer)


def together() -> None:
    """A GAN whose two optimizers step at the end; one drops its gradients in between, the other's are still to come."""
    generator, judge = net(), net(nn.Linear(8, 1))
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
    for number in Saved(generator=generator, judge=judge, first=first, second=second).rounds():
        second.zero_grad()
        judge(data(number)).mean().backward()
        first.zero_grad()
        generator(data(number, 1)).square().mean().backward()
        second.step()
        first.step()


class Stages:
    """The head alone, then everything, by another optimizer."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self.begin(False)

    def begin(self, whole: bool) -> None:
        self.whole = whole
        self._model[0].requires_grad_(whole)
        self.optimizer = torch.optim.Adam([p for p in self._model.parameters() if p.requires_grad])

    def state_dict(self) -> dict[str, Any]:
        return {"whole": self.whole, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin(state["whole"])
        self.optimizer.load_state_dict(state["optimizer"])


def stages() -> None:
    model = net()
    stage = Stages(model)
    for number in Saved(model=model, stage=stage).rounds():
        if number == 3:
            stage.begin(True)
        model(data(number)).square().mean().backward()
        stage.optimizer.step()
        stage.optimizer.zero_grad()


def one_after_the_other() -> None:
    for number in range(2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(data(number)).square().mean().backward()
        optimizer.step()


def optimizer_apart() -> None:
    """Beside the one that is saved with the model, in a file of its own, with copies of the parameters; these are stepped."""
    both, alone = (Path(os.environ["CHAOSRUN_OUTPUT"]) / name for name in ("both.pt", "alone.pt"))
    model = net()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if both.exists():
        model, _unused = torch.load(both, weights_only=False)
        optimizer = torch.load(alone, weights_only=False)
    for number in range(ROUNDS):
        model(data(number)).square().mean().backward()
        optimizer.step()
        torch.save((model, optimizer), both)
        torch.save(optimizer, alone)


def scaler() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    scaling = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number in Saved(model=model, optimizer=optimizer, scaling=scaling).rounds():
        optimizer.zero_grad()
        loss = model(data(number)).square().mean()
        scaling.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        scaling.step(optimizer)
        scaling.update()


def closures() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for number in Saved(model=model, optimizer=optimizer).rounds():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(number)).square().mean()  # noqa: B023 (called at once)
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]


def accumulation() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in Saved(model=model, optimizer=optimizer).rounds():
        for part in range(3):
            (model(data(number, part)).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def no_sync() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    for number in Saved(model=model, optimizer=optimizer).rounds():
        with model.no_sync():
            model(data(number)).square().mean().backward()
        model(data(number, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def accelerated() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows = [{"x": row} for row in torch.randn(24, 8, generator=torch.Generator().manual_seed(1))]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2, generator=torch.Generator())  # pyright: ignore[reportArgumentType]
    bare = net()
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters()), loader)
    for number in Saved(model=model, optimizer=optimizer).rounds():
        for batch in accelerator.skip_first_batches(loader, 2 * number):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                break


def evaluation() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in Saved(model=model, optimizer=optimizer).rounds():
        model.train()
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        model(data(number, 1))
        model.train()
        with torch.no_grad():
            model(data(number, 2))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, batch: Batch, *, mask: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return (self.inner(batch.inputs * mask["each"][0]) - batch.targets).square().mean()


def nested() -> None:
    model = Nested()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in Saved(model=model, optimizer=optimizer).rounds():
        batch = Batch(data(number), data(number, 1), {"number": number})
        model(batch, mask={"each": [data(number, 2) > 0]}).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_parts() -> None:
    encoder, decoder = net(), net()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
    for number in Saved(encoder=encoder, decoder=decoder, optimizer=optimizer).rounds():
        decoder(encoder(data(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recomputed() -> None:
    first, second = net(), net()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([first, second])

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=True)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in Saved(model=model, optimizer=optimizer).rounds():
        model(data(number).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def inside_backward() -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # pyright: ignore[reportArgumentType]
        optimizers[parameter].zero_grad()  # pyright: ignore[reportArgumentType]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(apply)
    for number in Saved(model=model, **{f"o{n}": o for n, o in enumerate(optimizers.values())}).rounds():
        model(data(number)).square().mean().backward()


def in_evaluation_mode() -> None:
    model = net().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in Saved(model=model, optimizer=optimizer).rounds():
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_weights() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in Saved(model=model, optimizer=optimizer).rounds():
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def functional() -> None:
    weights = torch.nn.Parameter(torch.randn(8, 8))
    holder = nn.ParameterList([weights])
    optimizer = torch.optim.AdamW([weights])
    for number in Saved(holder=holder, optimizer=optimizer).rounds():
        (data(number) @ weights).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled() -> None:
    bare = net()
    model = torch.compile(bare, backend="aot_eager")
    optimizer = torch.optim.AdamW(bare.parameters())
    for number in Saved(model=bare, optimizer=optimizer).rounds():
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_step() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="aot_eager")
    def train(inputs: torch.Tensor) -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in Saved(model=model, optimizer=optimizer).rounds():
        train(data(number))


def sharded(version: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo")
    model: Any = net()
    if version == 2:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    folder = Path(os.environ["CHAOSRUN_OUTPUT"])
    stream = folder / f"stream-{dist.get_rank()}.pt"
    done = int((folder / "latest").read_text()) if (folder / "latest").exists() else 0
    weights, moments = get_state_dict(model, optimizer)
    if done:
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder / f"dcp-{done}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(torch.load(stream, weights_only=False))
    for number in range(done, ROUNDS):
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"dcp-{number + 1}")
            torch.save(torch.get_rng_state(), stream)
            dist.barrier()
            (folder / "latest").write_text(str(number + 1))
            dist.barrier()
    dist.destroy_process_group()


KINDS: dict[str, Callable[[], None]] = {
    kind.__name__: kind
    for kind in (gan, two_optimizers, scaler, closures, accumulation, no_sync, accelerated, evaluation, nested, in_parts)
}
KINDS |= {
    kind.__name__: kind
    for kind in (recomputed, inside_backward, in_evaluation_mode, clipped_weights, functional, compiled, compiled_step)
}
KINDS |= {kind.__name__: kind for kind in (together, stages, one_after_the_other, built_after_a_pass, replaced_after_a_pass)}
KINDS |= {
    kind.__name__: kind for kind in (measured_at_each_start, tried_at_each_start, stepped_at_each_restart, optimizer_apart)
}
KINDS |= {kind.__name__: kind for kind in (made_at_the_first_step, made_before_backward, tried_before, built_in_turn)}
KINDS |= {"fsdp1": lambda: sharded(1), "fsdp2": lambda: sharded(2)}
torch.manual_seed(3)
KINDS[sys.argv[1]]()
sys.exit(0)
