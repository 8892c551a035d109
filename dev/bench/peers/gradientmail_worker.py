"""A worker of GradientMail, or its syncer: with its defaults, or ("streaming") with this benchmark's tau, alpha and
four bits."""
import time

from work import Work

work = Work()
model, inner, ended, fetching = work.model, work.optimizer, None, 0.0


def timed(batches):
    """Time between two steps that is not spent here is GradientMail's: it waits, encodes and merges."""
    global fetching
    while True:
        begin = time.monotonic()
        batch = next(batches, None)
        fetching = time.monotonic() - begin
        if batch is None:
            return
        yield batch


# user: from here
import gradientmail as gm

mode, role = work.given["mode"], work.given["role"]
streaming = {"delta_dtype": "F4", "overlap_steps": 5, "alignment": gm.Blend(0.5)} if mode == "streaming" else {}
polls = {"poll_interval": 0.02} if mode == "streaming" else {}
mailbox = gm.S3Mailbox(bucket=work.given["bucket"], prefix="run", endpoint_url=work.given["endpoint"])


def train_step(batch):
    global ended
    if ended is not None:
        work.write(type="wait", step=work.step, waited_seconds=max(0.0, time.monotonic() - ended - fetching))
    loss = work.compute(batch)
    inner.step()
    work.stepped(loss)
    ended = time.monotonic()
    return batch[0].numel()


def follow(event):
    if isinstance(event, gm.events.FragmentAligned):
        work.write(type="sync", step=work.step, round=event.round, lag=event.lag_steps)


session = gm.Session(model, algorithm=gm.DiLoCo(sync_every=27, fragments=3, **streaming), mailbox=mailbox, role=role,
                     node_id=f"{role}-{work.worker}", callbacks=[follow, gm.log_events], **polls)
# user: to here

if role == "syncer":
    session.run(train_step, [])
else:
    session.join()
    work.meet("ready")
    session.run(train_step, timed(work.batches()))
    work.meet("done")
    gm.align(model, mailbox=mailbox)
    work.end()
