import zmq

from tandem.engine.pulse import PULSE_S, PulseSender, PulseWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_silent_process_is_named_until_it_is_heard_again() -> None:
    clock = Clock()
    watch = PulseWatch(silent_s=2.0, clock=clock)
    assert watch.look() == []
    watch.heard("core")
    watch.heard("rank 0")
    for _ in range(5):
        clock.now += PULSE_S
        watch.heard("rank 0")
        seen = watch.look()
    assert seen == ["core"]
    watch.heard("core")
    assert watch.look() == []


def test_a_watcher_that_was_stopped_itself_accuses_nobody() -> None:
    clock = Clock()
    watch = PulseWatch(silent_s=2.0, clock=clock)
    watch.heard("core")
    clock.now += 60.0
    assert watch.look() == []
    clock.now += 1.1
    assert watch.look() == []
    clock.now += 1.1
    assert watch.look() == ["core"]


def test_pulses_arrive_until_the_sender_is_closed() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sender = PulseSender(f"tcp://127.0.0.1:{port}", "rank 3", pulse_s=0.01)
        for _ in range(3):
            assert socket.poll(10_000)
            assert socket.recv() == b"rank 3"
        sender.close()
        while socket.poll(0):
            socket.recv()
        assert not socket.poll(100)
