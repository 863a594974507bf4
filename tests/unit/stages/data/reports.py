"""Recorder of the messages that data preparation reports, so that tests can check them."""


class Reports:
    def __init__(self):
        self.warnings, self.messages, self.done = [], [], []

    def progress(self, done, total, unit, message=""):
        assert done <= total
        self.done.append(done)
        self.messages.append(message)

    def warn(self, message):
        self.warnings.append(message)
