#!/usr/bin/env bash
# As people keep their commands.
set -e
export OMP_NUM_THREADS=1
deepspeed --num_gpus 1 hello.py --checkpoint_dir experiments --batch_size 8
