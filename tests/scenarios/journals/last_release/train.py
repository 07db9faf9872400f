import argparse

import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.initialize(args=args)
