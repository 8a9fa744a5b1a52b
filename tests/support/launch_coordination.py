"""What tests share with launch/test_coordination.py."""

import threading

import pytest

from rekindle.errors import PreemptedError
from rekindle.launch.coordination import Coordinator, Member
from rekindle.launch.rendezvous import Rendezvous
from tests.ports import free_port

SECRET = "5" * 64


class Nodes:
    """Members of three nodes in this process, and the coordinator of the first."""

    def __init__(self, patience=20.0):
        port = free_port()
        self.places = [
            Rendezvous(3, node, 2, "127.0.0.1", port, patience, SECRET) for node in range(3)
        ]
        self.members = [Member(place, lambda: False) for place in self.places]
        self.coordinator = None

    def listen(self):
        self.coordinator = self.members[0].coordinator = Coordinator(self.places[0], 8)
        self.coordinator.start()

    def all(self, *calls):
        """Results, or errors, of calls made side by side."""
        results = [None] * len(calls)

        def run(i):
            try:
                results[i] = calls[i]()
            except PreemptedError as error:
                results[i] = error

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def meet(self, restart=0):
        return self.all(*(lambda m=m: m.meet(restart) for m in self.members))


@pytest.fixture
def nodes():
    made = Nodes()
    made.listen()
    yield made
    for member in made.members:
        member.close()
    made.coordinator.end()
