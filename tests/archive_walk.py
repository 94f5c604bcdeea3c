"""A seeded random walk over engines on one folder: turns, edits, restarts, kills, trouble of every kind. Whatever
happens, every turn's tokens are those of a from-scratch forward, and all invariants hold after every step.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Kit
from tiny_models import logits, model_of

from cache import whole_files
from cache.memory.memory_tier import MemoryTier
from cache.segments.chain import Owner
from cache.segments.segment_file import SegmentReader, timeline_hash
from cache.tiers import archive as archive_module
from cache.tiers import remover as remover_module
from cache.tiers import write_behind as saver_module
from cache.tiers.segment_folder import folder_of
from scheduler.protocol import Cancel, Export, Forget, Forgotten, Import, Imported, Inspect, Pin

LONGEST = 90  # tokens of a timeline
CLOSE = 1e-3  # of two logits: rounding may choose either

DEEDS = {  # and how likely they are
    "turn": 40,
    "advance": 20,
    "finish": 8,
    "look": 3,
    "forget": 3,
    "lose": 4,
    "pin": 2,
    "move": 3,
    "cancel": 2,
    "damage": 4,
    "weather": 5,
    "restart": 3,
    "kill": 2,
    "audit": 2,
    "vanish": 0.3,
}


@dataclass
class Asked:
    tenant: str
    session: str | None
    prompt: list[int]
    count: int
    cancelled: bool = False


class Walk:
    """``go`` takes random steps; ``end`` waits until all is quiet and looks at what is left."""

    def __init__(self, seed: int, name: str, folder: Path, patch: pytest.MonkeyPatch, *, remote: bool = False) -> None:
        self.random = random.Random(f"{name} {seed}")
        self.name = name
        self.folder = folder / "kv"
        self.aside = folder / "aside"
        self.aside.mkdir()
        self.remote = f"file://{folder / 'remote'}" if remote else None
        self.away = 0.0  # how often the remote tier fails
        self.failing: dict[str, float] = {}  # how often writes, reads and unlinks fail
        self.slow = 0.0  # seconds that a read or a write may wait for
        self.lazy = 0.0  # and the writer before it looks at pages, the remote tier before it does anything
        self.talks: dict[
            tuple[str, str], list[int]
        ] = {}  # what was said last under each name; "" and a number: anonymous
        self.flying: dict[str, Asked] = {}
        self.touched: set[str] = set()  # names of files that were tampered with
        self.counts: dict[str, int] = {}
        self._made = 0
        self._copies: list[tuple[Path, bytes]] = []
        self._break_things(patch)
        self.kit = self._start()

    # -- the walk -----------------------------------------------------------------------------------------------------

    def go(self, steps: int) -> None:
        """That many random things."""
        for _ in range(steps):
            (deed,) = self.random.choices(list(DEEDS), list(DEEDS.values()))
            self.counts[deed] = self.counts.get(deed, 0) + 1
            getattr(self, f"_{deed}")()

    def _turn(self) -> None:
        """Submit a turn that has something to do with what was said before, or not."""
        if len(self.flying) >= 5:
            return self._advance()
        tenant = self.random.choice("aab")
        session = self.random.choice([None, "s", "t", "u", "v"])
        taken = {(asked.tenant, asked.session) for asked in self.flying.values()}
        if session is not None and (tenant, session) in taken:
            session = None
        prompt = self._prompt(tenant, session)
        count = self.random.randint(1, 5)
        turn = self.kit.send(prompt, count, tenant=tenant, session=session)
        self.flying[turn] = Asked(tenant, session, prompt, count)
        if self.random.random() < 0.3:
            self._finish()
        return None

    def _prompt(self, tenant: str, session: str | None) -> list[int]:
        own = self.talks.get((tenant, session or ""))
        others = [talk for (whose, _), talk in self.talks.items() if whose == tenant]
        base = own if own is not None and self.random.random() < 0.7 else self.random.choice([*others, []])
        base = list(base)
        match self.random.randrange(7):
            case 0:  # rewound
                base = base[: self.random.randint(0, len(base))]
            case 1 if base:  # edited
                base[self.random.randrange(len(base))] = self._token()
            case 2:  # another turn on the same words
                base = base[: max(0, len(base) - 1)]
        base += [self._token() for _ in range(self.random.choice([0, 1, 2, 7, 20]))]
        return base[:LONGEST] or [self._token()]

    def _token(self) -> int:
        return self.random.randrange(6) if self.random.random() < 0.8 else self.random.randrange(250)

    def _advance(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.kit.step()
            if self.kit.engine.stalled:
                time.sleep(0.0005)
        self._collect()

    def _finish(self) -> None:
        self.kit.run()
        self._collect()
        assert not self.flying

    def _collect(self) -> None:
        """Compare what has ended with a forward from scratch."""
        for turn, asked in list(self.flying.items()):
            outcome = self.kit.outcomes[turn]
            if outcome.finish_reason is None:
                continue
            del self.flying[turn]
            timeline = [*asked.prompt, *outcome.tokens]
            if outcome.tokens:
                found = self._fresh(timeline, len(asked.prompt))
                chosen = found.gather(1, torch.tensor(outcome.tokens)[:, None])[:, 0]
                assert float((found.amax(1) - chosen).max()) < CLOSE, (asked, outcome.receipt)
            if not asked.cancelled:
                assert str(outcome.finish_reason) == "length", outcome
                assert len(outcome.tokens) == asked.count
                receipt = outcome.receipt
                assert sum(receipt.loaded.values()) <= receipt.cached < len(asked.prompt)
            self._made += asked.session is None
            self.talks[asked.tenant, asked.session or f"{self._made % 4}"] = timeline

    def _fresh(self, timeline: list[int], prompt: int) -> torch.Tensor:
        """The logits that each token after the prompt was drawn from, computed from scratch."""
        model = model_of(self.name)
        if self.kit.rope.threshold is None:
            return logits(model, timeline)[prompt - 1 : -1]
        return torch.stack([logits(model, timeline[:at])[-1] for at in range(prompt, len(timeline))])

    def _cancel(self) -> None:
        if self.flying:
            turn = self.random.choice(list(self.flying))
            self.flying[turn].cancelled = True
            self.kit.engine.cancel(Cancel(turn))
            self._advance()

    # -- questions ----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """A session is deleted, maybe while it runs, is written or is read."""
        tenant, session = self.random.choice("aab"), self.random.choice("stuv")
        for asked in self.flying.values():
            asked.cancelled |= (asked.tenant, asked.session) == (tenant, session)
        self.kit.engine.end(tenant, session)
        self.clerk.forget(Forget(tenant, session))
        self._advance()
        if self.random.random() < 0.5:
            self._gone(Owner(tenant, session, True))

    def _gone(self, owner: Owner) -> None:
        """No tier holds anything of a deleted session any more, but for what others go on from."""
        self._quiet()
        if (
            Forgotten(*owner[:2]) not in self.clerk.take()
        ):  # something failed: it is asked for again, as the server does
            self.clerk.forget(Forget(*owner[:2]))
            self._quiet()
            assert Forgotten(*owner[:2]) in self.clerk.take()
        if not any((asked.tenant, asked.session) == owner[:2] for asked in self.flying.values()):
            assert self.disk.head(owner) is None
            assert self.kit.store.find(*owner[:2]) is None
            kept = {s.name for head in self.disk.heads.values() for s in head.tip.chain()}
            assert {path.name for path in self._files(folder_of(owner))} <= kept | self.touched

    def _pin(self) -> None:
        until = self.random.choice([0.0, 1e12])
        self.clerk.pin(Pin(self.random.choice("ab"), self.random.choice("stuv"), until))

    def _look(self) -> None:
        self.clerk.take()
        self.clerk.inspect(Inspect("r", self.random.choice("ab"), self.random.choice("stuv")))
        (answer,) = self.clerk.take()
        assert all(held.tokens > 0 for held in answer.tiers.values()), answer  # type: ignore[union-attr]

    def _move(self) -> None:
        """Export a session, and import it under another name."""
        tenant, session, name = self.random.choice("ab"), self.random.choice("stuv"), self.random.choice("stuv")
        capsule = self.aside / f"capsule{len(list(self.aside.iterdir()))}"
        self.clerk.export(Export("r", tenant, session, str(capsule)))
        for _ in range(self.random.randint(0, 3)):
            self._advance()
        self._quiet(failing=True)
        self.clerk.take()
        if any((asked.tenant, asked.session) == ("b", name) for asked in self.flying.values()):
            return
        self.clerk.take_in(Import("q", "b", name, str(capsule)))
        self._quiet(failing=True)
        (answer,) = self.clerk.take()
        assert isinstance(answer, Imported)
        found = self.kit.store.find("b", name)
        if answer.tokens and found is not None:  # the states of others may leave no room for it
            self.talks["b", name] = list(found.cached)
        shutil.rmtree(capsule, ignore_errors=True)

    # -- trouble ------------------------------------------------------------------------------------------------------

    def _weather(self) -> None:
        """What fails, and how slow it is, from now on."""
        for what in ("write", "read", "remove", "bug"):
            self.failing[what] = self.random.choice([0.0, 0.0, 0.0, 0.1, 0.5] if what != "bug" else [0.0, 0.0, 0.05])
        self.away = self.random.choice([0.0, 0.0, 0.3, 1.0])
        self.slow = self.random.choice([0.0, 0.0, 0.003])
        self.lazy = self.random.choice([0.0, 0.0, 0.03])

    def _damage(self) -> None:
        """Tamper with a file under the running engine."""
        found = self._files()
        if not found:
            return
        path = other = self.random.choice(found)
        try:
            size = path.stat().st_size
            other = self.random.choice([file for file in found if file.stat().st_size == size])
            data = bytearray(path.read_bytes())
            match self.random.randrange(7):
                case 0:
                    data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                case 1:
                    del data[self.random.randrange(len(data)) :]
                case 2:
                    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
                case 3:
                    path.unlink()
                case 4:
                    data, content = bytearray(other.read_bytes()), bytes(data)
                    self._put(other, content)
                case 5:
                    self._copies.append((path, bytes(data)))
                    return
                case 6 if self._copies:  # an older generation comes back
                    path, content = self.random.choice(self._copies)
                    path.parent.mkdir(exist_ok=True)
                    data = bytearray(content)
            self._put(path, bytes(data))
        except FileNotFoundError:
            pass  # the writer was quicker
        self.touched |= {path.name, other.name}

    def _put(self, path: Path, data: bytes) -> None:
        """In place of the file, not into it: exported files are links."""
        beside = path.with_name("beside")
        beside.write_bytes(data)
        beside.rename(path)

    def _lose(self) -> None:
        """Memory forgets what is idle."""
        for session in [*self.kit.store.residency.warm, *self.kit.store.residency.hosted]:
            self.kit.store.discard(session)
        self._advance()

    def _vanish(self) -> None:
        """Somebody removes the whole folder."""
        shutil.rmtree(self.disk.folder, ignore_errors=True)
        self._quiet()
        self.touched |= {segment.name for segment in self.disk._known}  # what has just been written too

    def _restart(self) -> None:
        """The engine ends in order."""
        self._finish()
        self.kit.leave() if not any(self.failing.values()) else self._drop()
        self.kit = self._start()

    def _kill(self) -> None:
        """The engine dies: what its threads are doing may or may not happen, nothing else."""
        self.flying.clear()
        self._drop()
        self.kit = self._start()

    def _drop(self) -> None:
        self.kit.archive.close()

    def _start(self) -> Kit:
        small = self.random.random() < 0.7
        kit = Kit(
            self.name,
            pages=self.random.choice([32, 48, 64]) if small else 512,
            host_pages=self.random.choice([0, 0, 16, 40]),
            step_tokens=self.random.choice([8, 32, 64]),
            max_running=self.random.choice([2, 8]),
            state_budget=self.random.choice([1 << 18, 1 << 30]),
            folder=self.folder,
            disk_space=self.random.choice([120_000, 400_000, 1 << 30]),
            remote=self.remote,
            remote_space=self.random.choice([None, 60_000]),
            share=self.random.choice([1.0, 0.5]),
        )
        self.disk = kit.archive.disk
        self.clerk = kit.commands
        if kit.archive.syncs:
            self._hurt_remote(kit.archive.syncs[0].lower)
        return kit

    def _break_things(self, patch: pytest.MonkeyPatch) -> None:
        """Make what touches files slow and unreliable, as the weather says."""
        patch.setattr(remover_module, "_PAUSE", 0.002)
        patch.setattr(archive_module, "_STUCK", 0.02)
        patch.setattr(saver_module, "_PAUSE", 0.002)
        dice = random.Random(self.random.random())

        def hurt(owner: Any, name: str, what: str) -> None:
            real: Callable[..., Any] = getattr(owner, name)

            def hurting(*args: Any, **options: Any) -> Any:
                if self.slow or self.lazy:
                    time.sleep(dice.random() * (self.lazy if what == "gather" else self.slow))
                if dice.random() < self.failing.get(what, 0.0):
                    raise OSError(28, "No space left on device")
                if dice.random() < self.failing.get("bug", 0.0) and what in ("write", "read"):
                    raise RuntimeError("cannot allocate memory")
                return real(*args, **options)

            patch.setattr(owner, name, hurting)

        hurt(saver_module, "write", "write")
        hurt(MemoryTier, "gather", "gather")
        hurt(MemoryTier, "scatter", "scatter")
        hurt(SegmentReader, "read", "read")
        hurt(whole_files, "remove", "remove")

    def _hurt_remote(self, remote: Any) -> None:
        dice = random.Random(self.random.random())
        for name in ("put", "get", "names", "remove", "collect"):
            real = getattr(remote, name)

            def hurting(*args: Any, real: Any = real) -> Any:
                time.sleep(dice.random() * self.lazy)
                if dice.random() < self.away:
                    raise OSError("the remote tier does not answer")
                return real(*args)

            setattr(remote, name, hurting)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _quiet(self, failing: bool = False) -> None:
        """Nothing is being read or written any more; unless ``failing`` all that was to be done has been."""
        before = self.failing, self.away
        if not failing:
            self.failing, self.away = {}, 0.0
        archive = self.kit.archive
        until = time.monotonic() + 60
        while archive.busy or (not failing and (archive.remover.left or self.disk.space.obsolete)):
            archive.poll()
            time.sleep(0.0005)
            assert time.monotonic() < until, "no end"
        self.kit.engine.check_integrity()
        self.failing, self.away = before

    def _files(self, folder: str = "") -> list[Path]:
        found = ((Path(at), name) for at, _, names in os.walk(self.disk.folder) for name in names)
        return sorted(at / name for at, name in found if name.endswith(".kv") and folder in ("", at.name))

    def _audit(self) -> None:
        """When all is quiet the files are those that the tier knows, and its index finds every session."""
        self._finish()
        self._quiet()
        known = {segment.name for segment in self.disk._known}
        there = {path.name for path in self._files()}
        assert known - there <= self.touched
        assert there - known <= self.touched
        assert self.disk.space.obsolete_bytes == 0
        for segment in self.disk._known:
            ids, mask = segment.timeline()
            assert segment.after == timeline_hash(ids.tobytes(), bytes(mask))
        for head in self.disk.heads.values():
            if head.shareable:
                _, shared = self.disk.match(head.tenant, head.shareable, head.tip.long)
                assert shared == len(head.shareable)
        archive = self.kit.archive
        assert not archive._fetches
        assert not archive._arriving
        assert not archive.held
        assert not self.disk._holds
        assert not self.disk._planned

    def end(self) -> None:
        """Every turn has ended, nothing is left over."""
        self._audit()
        self.kit.leave()
