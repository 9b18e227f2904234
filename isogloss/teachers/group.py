"""Pass what one teacher is asked to several, or take part in the passes of those shared."""

import contextlib
from dataclasses import dataclass

from isogloss.teachers.protocol import TeacherSource


@dataclass
class TeacherGroup(TeacherSource):
    """Pass what one teacher is asked to several.

    Attributes:
        members: TeacherSource of each.
    """

    members: list

    def request(self, batch):
        for member in self.members:
            member.request(batch)

    def wait(self, batches):
        for member in self.members:
            member.wait(batches)

    def end_when(self, asked_to_end):
        for member in self.members:
            member.end_when(asked_to_end)

    @contextlib.contextmanager
    def on_device(self):
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.on_device())
            yield

    def release(self):
        for member in self.members:
            member.release()

    def follow(self, student):
        for member in self.members:
            member.follow(student)

    def save(self, path):
        for number, member in enumerate(self.members):
            member.save(path.with_name(f"{path.name}_{number}"))

    def restore(self, path, student):
        for number, member in enumerate(self.members):
            member.restore(path and path.with_name(f"{path.name}_{number}"), student)

    def close(self):
        for member in self.members:
            member.close()

    def models(self):
        return [model for member in self.members for model in member.models()]


class SilentTeacher(TeacherGroup):
    """Take part in a teacher's forward passes on a rank that computes no loss, and keep nothing.

    Its members are what its ranks do together; often there is nothing.
    """

    def request(self, batch):
        """Do nothing: a rank that computes the loss asks."""

    def targets(self, batch):
        for member in self.members:
            member.targets(batch)

    def whole_targets(self, batch):
        for member in self.members:
            member.whole_targets(batch)


def load_silent(spec):
    """Load what other ranks need of a teacher on this one, which computes no loss."""
    return SilentTeacher(list(filter(None, (member.silent() for member in spec.single()))))
