"""Runs rdma-core's tests, and prints a line when a test starts and a line with its result."""

import os
import re
import runpy
import sys
import traceback
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import tests.base


def address(self, dev, port, idx):
    self.args.append([dev, port, idx, os.environ['ADDRESS'], None])


# The tests search for the device address in the kernel's directory for its network interface, but a
# software device has no such directory and these tests would be skipped.
tests.base.RDMATestCase._get_ip_mac = address


class Lines(unittest.TestResult):
    def __init__(self, *_args, **_kwargs):
        super().__init__()

    def say(self, how, test, why=''):
        name = test.id().removeprefix('tests.')
        # The setup of a class or a module is not a test.
        setup = re.fullmatch(r'(\w+) \((?:tests\.)?(.*)\)', name)
        if setup:
            name = f'{setup[2]}.{setup[1]}'
        # A library may have printed a message without a newline.
        print(f'\ntest: {how} {name}: {why}', flush=True)

    def fail(self, test, error):
        lines = traceback.format_exception_only(error[0], error[1])[-1].strip().splitlines()
        self.say('FAILED', test, lines[-1] if lines else '')

    def startTest(self, test):
        super().startTest(test)
        self.say('started', test)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.say('ok', test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.say('skipped', test, reason)

    def addError(self, test, error):
        super().addError(test, error)
        self.fail(test, error)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.fail(test, error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.fail(test, error)


unittest.TextTestRunner.resultclass = Lines
runpy.run_path(os.path.join(HERE, 'run_tests.py'), run_name='__main__')
