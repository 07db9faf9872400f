# What Slurm tells a rank, as torch asks for it.
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29511}
exec python "$@"
