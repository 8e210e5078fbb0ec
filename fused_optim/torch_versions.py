"""The private names of torch that the package uses, each with the releases that have it.

A release may rename them without notice. tests/test_torch_versions.py looks each up in the torch that runs, and fails
for one that the package uses and this does not name. Public names of private objects are here, too.
"""

from __future__ import annotations

RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")  # that were tried

_ALWAYS = (
    # tensors and their subclasses
    "torch.Tensor._is_zerotensor",
    "torch.Tensor._make_wrapper_subclass",
    "torch.Tensor._version",  # the engines, too
    "torch.UntypedStorage._cdata",
    "torch.UntypedStorage._new_shared",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey",
    "torch._C.PyTorchFileReader",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_keys",
    "torch._lazy_clone",
    "torch._neg_view",
    "torch._ops.OpOverload",
    "torch._ops.OpOverload._schema",
    "torch._ops.OpOverload.decompose",
    "torch._ops.OpOverload.has_kernel_for_dispatch_key",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._python_dispatch.return_and_correct_aliasing",
    "torch.utils._pytree.tree_map_only",
    # operations
    "torch._foreach_copy_",
    "torch._grouped_mm",
    "torch._scaled_grouped_mm",
    "torch._scaled_mm",
    "torch.ops.aten._foreach_copy_",
    "torch.ops.aten._pin_memory",
    "torch.ops.aten._to_copy",
    "torch.ops.aten._unsafe_view",
    # what a call is part of: compiled code, a dispatch mode, torch.func, a profile, a stream, code without gradients
    "torch._C._TorchDispatchModeKey",
    "torch._C._are_functorch_transforms_active",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._cuda_getCurrentRawStream",  # in builds for GPUs
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._get_dispatch_mode",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._set_grad_enabled",
    "torch._disable_dynamo",
    "torch.autograd._profiler_enabled",
    "torch.autograd.forward_ad._current_level",
    # a backward pass, while it runs
    "torch._C._current_graph_task_id",
    "torch.autograd.Variable._execution_engine.queue_callback",
    # modules, optimizers, GradScaler
    "torch.amp.grad_scaler.GradScaler._check_inf_per_device",
    "torch.amp.grad_scaler.GradScaler._get_scale_async",
    "torch.amp.grad_scaler.GradScaler._per_optimizer_states",
    "torch.nn.Module._apply",
    "torch.nn.modules.module.Module._parameters",
    "torch.nn.modules.conv._ConvNd",
    "torch.optim.optimizer.Optimizer._optimizer_load_state_dict_post_hooks",
    "torch.optim.optimizer.Optimizer._optimizer_load_state_dict_pre_hooks",
    "torch.optim.optimizer.Optimizer._optimizer_state_dict_post_hooks",
    "torch.optim.optimizer.Optimizer._optimizer_state_dict_pre_hooks",
    "torch.optim.optimizer.Optimizer._optimizer_step_post_hooks",
    "torch.optim.optimizer.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    # DTensors and collectives
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch.distributed.distributed_c10d._get_object_coll_device",
    "torch.distributed.tensor.DTensor._local_tensor",  # the engines, too
    "torch.distributed.tensor.DTensor._spec",  # the engines, too
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.distributed.tensor.Shard._split_tensor",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.distributed.tensor.placement_types._StridedShard._split_tensor",
    # FSDP2's records of parameters, and FSDP1's marks on them
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._param_fqn",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_inner_tensors",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.all_gather_outputs",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.sharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.unsharded_accumulated_grad",
    "torch.distributed.fsdp._fully_shard._fsdp_param.ParamModuleInfo.param_name",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.fsdp_params",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
    "torch.distributed.fsdp._common_utils.FSDP_FLATTENED",
    "torch.distributed.fsdp._flat_param.FlatParameter._is_flat_param",
    # checkpoints: what writes and reads them, and names in their pickles
    "torch._utils._rebuild_tensor_v2",
    "torch._weights_only_unpickler._get_allowed_globals",
    "torch.distributed._state_dict_utils._broadcast_tensors",
    "torch.distributed._state_dict_utils._iterate_state_dict",
    "torch.distributed.checkpoint._nested_dict.flatten_state_dict",
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager",
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager.stage",
    "torch.distributed.checkpoint._traverse.set_element",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.state_dict._gather_state_dict",
    "torch.distributed.checkpoint.state_dict._get_fqns",
    "torch.serialization._get_layout",
)
PRIVATE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALWAYS, RELEASES),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": RELEASES[1:],
}

# What quantized/tensor/patches.py replaces in torch when the first quantized weight is made, and the program that needs
# it. Contexts replace for their time: quantized_model_init notes modules and optimizers that are made, and
# integrations/megatron.py adds the package's optimizers to Megatron's choices.
REPLACED = {
    "torch.distributed.tensor.DTensor.redistribute": "full_tensor() on one rank gives plain values, as on several",
    "torch.distributed.checkpoint.state_dict._gather_state_dict": "get_model_state_dict(full_state_dict=True)",
    "torch.distributed._state_dict_utils._broadcast_tensors": "set_model_state_dict(broadcast_from_rank0=True)",
    "torch.optim.swa_utils.AveragedModel.__init__": "averages would be rounded to codes, and stand still: refused",
}
