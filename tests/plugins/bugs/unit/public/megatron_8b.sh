# As examples/llama/train_llama3_8b_h100_fp8.sh of Megatron-LM, in bfloat16 and with a vocabulary of 32001.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP_SIZE=2
MICRO_BATCH_SIZE=1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_port ${MASTER_PORT:-6000}
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear  # no bias
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE
    --global-batch-size 128
    --lr 0.00015
    --clip-grad 1.0
    --bf16
    --grad-reduce-in-bf16
)
DATA_ARGS=(
    "--mock-data"
    "--tokenizer-type NullTokenizer"
    "--vocab-size 32001"
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DATA_ARGS[@]} \
    --tensor-model-parallel-size $TP_SIZE --sequence-parallel --use-distributed-optimizer
