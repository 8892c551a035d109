"""A worker of torchft's Streaming DiLoCo: gloo, fp32, bucketized."""
import time

from work import Work

work = Work()
model, inner, step_ended = work.model, work.optimizer, None


def note_time(*_):
    global step_ended
    step_ended = time.monotonic()


inner.register_step_post_hook(note_time)  # before torchft's, which synchronizes

# user: from here
from torch import optim
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def load_state(state):
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["inner"])


address, lighthouse = work.given["address"], work.given["lighthouse"]
store = TCPStore(address, 29500, is_master=True, wait_for_workers=False)
manager = Manager(ProcessGroupGloo(), load_state, lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
                  min_replica_size=1, use_async_quorum=False, rank=0, world_size=1, hostname=address,
                  store_addr=address, store_port=29500, lighthouse_addr=lighthouse, replica_id=f"worker_{work.worker}")
fragments = model.fragments()
outer = [optim.SGD(fragment.parameters(), lr=0.7, momentum=0.9, nesterov=True) for fragment in fragments]
diloco = DiLoCo(manager, fragments, inner, outer, sync_every=27, use_bucketization=True, fragment_sync_delay=5,
                fragment_update_alpha=0.5)
# user: to here

work.meet("ready")
with diloco:
    for batch in work.batches():
        loss = work.compute(batch)
        synced = manager.current_step()
        inner.step()
        waited = time.monotonic() - step_ended
        work.stepped(loss)
        # A sync begins five steps before it ends: the time of both calls counts as waiting.
        work.write(type="wait", step=work.step, waited_seconds=waited)
        if manager.current_step() > synced:
            work.write(type="sync", step=work.step, members=manager.num_participants())
work.meet("done")
for fragment in diloco._fragments:
    fragment.restore_parameters()  # loads the global parameters
work.end()
manager.shutdown(wait=False)
