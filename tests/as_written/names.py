"""What of THUDM/slime's names code can import here, and how each differs: `NAMES`, by dotted name.

`test_names.py` imports and calls them; a table of the documentation is made of them. A new name of `slime-compat` has
its line here.
"""

from __future__ import annotations

from tests.as_written.verdict import Verdict

NAMES: dict[str, Verdict] = {
    "fully_async_rollout.generate_rollout_fully_async": Verdict(
        "differs", "slime.rollout.fully_async_rollout's, under the name of the example's file"
    ),
    "slime.agent.adapters.AnthropicAdapter": Verdict(
        "differs",
        "slime_agent_base_url.AgentServer: only keys of open sessions are let in; a client's temperature has no effect",
    ),
    "slime.agent.adapters.BaseAdapter": Verdict(
        "differs", "open_session, finish_session, drop_session and app are there; its inner methods are not"
    ),
    "slime.agent.adapters.OpenAIAdapter": Verdict(
        "differs", "the same, with the Responses API; every adapter has all endpoints"
    ),
    "slime.agent.adapters.ResponsesAdapter": Verdict("differs", "another name of OpenAIAdapter"),
    "slime.agent.adapters.anthropic.AnthropicAdapter": Verdict("differs", "as slime.agent.adapters.AnthropicAdapter"),
    "slime.agent.adapters.common.BaseAdapter": Verdict("differs", "as slime.agent.adapters.BaseAdapter"),
    "slime.agent.adapters.common.TurnRecord": Verdict("works", "as slime.agent.trajectory.TurnRecord"),
    "slime.agent.adapters.common.flatten_content": Verdict("works", "same arguments, same answer"),
    "slime.agent.adapters.openai.OpenAIAdapter": Verdict("differs", "as slime.agent.adapters.OpenAIAdapter"),
    "slime.agent.adapters.openai.ResponsesAdapter": Verdict("differs", "another name of OpenAIAdapter"),
    "slime.agent.aiohttp_threaded.AppHandle": Verdict("works", "what run_app_in_thread returns"),
    "slime.agent.aiohttp_threaded.FilteredAccessLogger": Verdict("works", "logs refused and slow requests"),
    "slime.agent.aiohttp_threaded.run_app_in_thread": Verdict("works", "the handle has port, url and stop()"),
    "slime.agent.harness.BaseHarness": Verdict(
        "differs", "a subclass says command() and write_config(); launch_and_wait runs it"
    ),
    "slime.agent.harness.CLAUDE_CODE": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.CODEX": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.ClaudeCodeHarness": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.CodexHarness": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.HarnessContext": Verdict("works", "same fields"),
    "slime.agent.harness.claude_code.CLAUDE_CODE": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.claude_code.ClaudeCodeHarness": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.codex.CODEX": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.codex.CodexHarness": Verdict(
        "differs", "the program has to be in the sandbox, nothing is installed; its home is below the working directory"
    ),
    "slime.agent.harness.common.BaseHarness": Verdict("differs", "as slime.agent.harness.BaseHarness"),
    "slime.agent.harness.common.HarnessContext": Verdict("works", "same fields"),
    "slime.agent.parsing.ParsedModelOutput": Verdict("works", "reasoning, text, tool_uses, ill_formed"),
    "slime.agent.parsing.parse_model_output": Verdict(
        "differs", "plugins of the kind tool_parsers instead of SGLang's parsers; <think> tags are always reasoning"
    ),
    "slime.agent.parsing.parse_xml_tool_uses": Verdict("works", "same arguments, same answer"),
    "slime.agent.sandbox.E2BSandbox": Verdict(
        "differs", "no client of E2B's service: an object of the class that SLIME_E2B_SANDBOX=file.py:Class names"
    ),
    "slime.agent.sandbox.EXIT_TIME_BUDGET_EXCEEDED": Verdict("works", "same arguments, same answer"),
    "slime.agent.sandbox.ExecResult": Verdict(
        "works", "slime_sandbox_local.ExecResult, which unpacks as (code, out, err)"
    ),
    "slime.agent.sandbox.LocalSandbox": Verdict("works", "slime_sandbox_local.LocalSandbox; not in THUDM/slime"),
    "slime.agent.sandbox.Sandbox": Verdict("works", "slime_sandbox_local.Sandbox"),
    "slime.agent.sandbox.SandboxError": Verdict("works", "slime_sandbox_local.SandboxError; not in THUDM/slime"),
    "slime.agent.sandbox.ensure_agent_user": Verdict(
        "differs", "makes the directory; programs of a local sandbox have no rights to drop"
    ),
    "slime.agent.sandbox.exec_and_wait": Verdict("differs", "one call with a deadline, no marker files"),
    "slime.agent.trajectory.TrajectoryManager": Verdict(
        "differs", "turns need their log-probs; a cut or truncated sample is TRUNCATED; takes reward"
    ),
    "slime.agent.trajectory.TurnRecord": Verdict("works", "same fields"),
    "slime.backends.megatron_utils.actor": Verdict("refused", "--train-backend megatron"),
    "slime.backends.megatron_utils.cp_utils.all_gather_with_cp": Verdict(
        "differs", "the tensor as it is: a user's function has whole responses on every context-parallel rank"
    ),
    "slime.backends.megatron_utils.cp_utils.get_sum_of_sample_mean": Verdict(
        "differs", "over whole responses, whatever the context-parallel size"
    ),
    "slime.backends.megatron_utils.cp_utils.slice_log_prob_with_cp": Verdict(
        "differs", "the log-probs as they are, for the same reason"
    ),
    "slime.backends.megatron_utils.loss.compute_approx_kl": Verdict("works", "as utils.ppo_utils"),
    "slime.backends.megatron_utils.loss.compute_policy_loss": Verdict("works", "as utils.ppo_utils"),
    "slime.backends.megatron_utils.loss.get_log_probs_and_entropy": Verdict(
        "works", "(empty tensor, columns), which can be indexed by column as well"
    ),
    "slime.backends.megatron_utils.loss.get_responses": Verdict("works", "same arguments, same answer"),
    "slime.backends.megatron_utils.loss.get_sum_of_sample_mean": Verdict(
        "differs", "as cp_utils.get_sum_of_sample_mean"
    ),
    "slime.backends.megatron_utils.loss.icepop_function": Verdict("works", "the correction icepop"),
    "slime.backends.megatron_utils.loss.vanilla_tis_function": Verdict("works", "the correction tis"),
    "slime.backends.sglang_utils.sglang_engine": Verdict("refused", "--rollout-engine sglang"),
    "slime.data.RolloutDataSource": Verdict(
        "differs", "a source that knows no groups, built with (dataset, args); not rollout.data_source's"
    ),
    "slime.data.RolloutDataSourceWithBuffer": Verdict(
        "differs", "as slime.data.RolloutDataSource, with a list of samples to train on again"
    ),
    "slime.data.Sample": Verdict("works", "as utils.types.Sample"),
    "slime.data.Dataset": Verdict("differs", "as utils.data.Dataset"),
    "slime.data.read_file": Verdict("works", "as utils.data.read_file"),
    "slime.observability.metric_utils.compute_pass_rate": Verdict("works", "same arguments, same answer"),
    "slime.observability.metric_utils.compute_rollout_step": Verdict(
        "differs", "the rollout's number always; --wandb-always-use-train-step is refused"
    ),
    "slime.observability.metric_utils.compute_statistics": Verdict("works", "nothing for no values"),
    "slime.observability.metric_utils.dict_add_prefix": Verdict("works", "same arguments, same answer"),
    "slime.observability.metric_utils.has_repetition": Verdict("works", "same arguments, same answer"),
    "slime.observability.trace_utils.TraceHandle": Verdict("works", "made by bind_trace or import_trace"),
    "slime.observability.trace_utils.TraceSpanContext": Verdict("works", "set, update; what trace_span yields"),
    "slime.observability.trace_utils.bind_trace": Verdict("works", "same arguments, same answer"),
    "slime.observability.trace_utils.build_sglang_meta_trace_attrs": Verdict(
        "works", "an answer without finish_reason is taken as well"
    ),
    "slime.observability.trace_utils.export_trace": Verdict("works", "same arguments, same answer"),
    "slime.observability.trace_utils.import_trace": Verdict("works", "same arguments, same answer"),
    "slime.observability.trace_utils.trace_event": Verdict("works", "same arguments, same answer"),
    "slime.observability.trace_utils.trace_function": Verdict(
        "differs", "a parameter name that the function does not have is an error at once"
    ),
    "slime.observability.trace_utils.trace_next_attempt": Verdict("works", "same arguments, same answer"),
    "slime.observability.trace_utils.trace_span": Verdict(
        "works", "errors of a user's own target_getter or attrs_getter are raised"
    ),
    "slime.ray": Verdict("refused", "slime train runs the loop; --launcher ray"),
    "slime.rollout.base_types.RolloutFnEvalOutput": Verdict("works", "slime_core's"),
    "slime.rollout.base_types.RolloutFnTrainOutput": Verdict("works", "slime_core's"),
    "slime.rollout.base_types.call_rollout_fn": Verdict("works", "an answer that is none is a RolloutError"),
    "slime.rollout.data_source.DataSource": Verdict("works", "the same methods"),
    "slime.rollout.data_source.RolloutDataSource": Verdict("differs", "slime_core's order of an epoch"),
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": Verdict("differs", "the buffer is part of the checkpoint"),
    "slime.rollout.data_source.pop_first": Verdict("works", "same arguments, same answer"),
    "slime.rollout.filter_hub.base_types.DynamicFilterOutput": Verdict("works", "slime_core.FilterDecision"),
    "slime.rollout.filter_hub.base_types.MetricGatherer": Verdict("works", "same arguments, same answer"),
    "slime.rollout.filter_hub.base_types.call_dynamic_filter": Verdict("works", "same arguments, same answer"),
    "slime.rollout.filter_hub.base_types.should_drop_dynamic_filter_output": Verdict(
        "works", "same arguments, same answer"
    ),
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": Verdict(
        "differs", "a group of one is kept"
    ),
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": Verdict(
        "differs", "a group of one is kept"
    ),
    "slime.rollout.forge_load.generate_rollout": Verdict("refused", "--load-debug-rollout-data"),
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker": Verdict(
        "differs", "lives in an event loop instead of a thread: take(limit)"
    ),
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": Verdict(
        "differs",
        "errors end the run; filters and evaluation work; --async --async-mode full also resumes",
    ),
    "slime.rollout.on_policy_distillation.post_process_rewards": Verdict("works", "same arguments, same answer"),
    "slime.rollout.on_policy_distillation.reward_func": Verdict("works", "scored tokens must be the response's"),
    "slime.rollout.rm_hub.async_rm": Verdict("differs", "a sample's own choice always wins; graders run on threads"),
    "slime.rollout.rm_hub.batched_async_rm": Verdict("differs", "a sample's own custom_rm_path counts here as well"),
    "slime.rollout.rm_hub.compute_gpqa_reward": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.compute_score_dapo": Verdict("differs", "labels need not be integers"),
    "slime.rollout.rm_hub.deepscaler.get_deepscaler_rule_based_reward": Verdict("works", "any of a list of labels"),
    "slime.rollout.rm_hub.extract_boxed_answer": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.f1.f1_score": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.f1.normalize_answer": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.f1_score": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.get_deepscaler_rule_based_reward": Verdict("works", "any of a list of labels"),
    "slime.rollout.rm_hub.gpqa.DEFAULT_VALID_LETTERS": Verdict("works", "the letters A to J"),
    "slime.rollout.rm_hub.gpqa.compute_gpqa_reward": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.grade_answer_verl": Verdict(
        "works", "the reward deepscaler's; equal numbers are equal however they are written"
    ),
    "slime.rollout.rm_hub.ifbench.compute_ifbench_reward": Verdict(
        "differs", "nothing is installed at import; the checks are the plugin's own"
    ),
    "slime.rollout.rm_hub.math_dapo_utils.compute_score": Verdict(
        "differs", "labels need not be integers; pause_tokens_index is refused"
    ),
    "slime.rollout.rm_hub.math_dapo_utils.is_correct_minerva": Verdict("differs", "labels need not be integers"),
    "slime.rollout.rm_hub.math_dapo_utils.is_correct_strict_box": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.math_dapo_utils.last_boxed_only_string": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.math_dapo_utils.normalize_final_answer": Verdict(
        "differs", "units and commands of DAPO's list and a few more"
    ),
    "slime.rollout.rm_hub.math_dapo_utils.remove_boxed": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.math_dapo_utils.verify": Verdict("works", "as compute_score"),
    "slime.rollout.rm_hub.math_utils.extract_answer": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.math_utils.extract_boxed_answer": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.math_utils.grade_answer_mathd": Verdict("works", "an empty text is no answer"),
    "slime.rollout.rm_hub.math_utils.grade_answer_sympy": Verdict(
        "differs", "LaTeX's grammar instead of eval; what is worked out may answer an integer"
    ),
    "slime.rollout.rm_hub.math_utils.grade_answer_verl": Verdict(
        "works", "the reward deepscaler's; equal numbers are equal however they are written"
    ),
    "slime.rollout.rm_hub.math_utils.last_boxed_only_string": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.math_utils.mathd_normalize_answer": Verdict("works", "as in the MATH data set"),
    "slime.rollout.rm_hub.math_utils.remove_boxed": Verdict("works", "same arguments, same answer"),
    "slime.rollout.rm_hub.remote_rm": Verdict("differs", "max_retries is plugins.remote_rm.attempts"),
    "slime.rollout.sample_hooks.apply_rollout_sample_hooks": Verdict(
        "differs", "a hook that raises makes its sample FAILED"
    ),
    "slime.rollout.sample_hooks.set_current_rollout_id": Verdict("works", "same arguments, same answer"),
    "slime.rollout.sft_rollout.generate_rollout": Verdict("works", "the rollout function sft"),
    "slime.rollout.sglang_rollout.GenerateState": Verdict(
        "differs", "processor is None; semaphores and connections are kept per event loop"
    ),
    "slime.rollout.sglang_rollout.abort": Verdict("works", "same arguments, same answer"),
    "slime.rollout.sglang_rollout.eval_rollout": Verdict("works", "same arguments, same answer"),
    "slime.rollout.sglang_rollout.eval_rollout_single_dataset": Verdict("works", "same arguments, same answer"),
    "slime.rollout.sglang_rollout.generate": Verdict(
        "differs",
        "a function that raises makes its sample FAILED; fan-out siblings stand side by side; every sample has a seed",
    ),
    "slime.rollout.sglang_rollout.generate_and_rm": Verdict(
        "differs",
        "a function that raises makes its sample FAILED; fan-out siblings stand side by side; every sample has a seed",
    ),
    "slime.rollout.sglang_rollout.generate_and_rm_group": Verdict(
        "differs",
        "a function that raises makes its sample FAILED; fan-out siblings stand side by side; every sample has a seed",
    ),
    "slime.rollout.sglang_rollout.generate_rollout": Verdict(
        "differs", "slime_core's rules: surplus groups are given back"
    ),
    "slime.rollout.sglang_rollout.generate_rollout_async": Verdict("differs", "as generate_rollout"),
    "slime.rollout.sglang_rollout.get_model_url": Verdict(
        "differs", "an unknown name is an error that lists the models"
    ),
    "slime.rollout.sglang_streaming_rollout.generate_streaming": Verdict(
        "works", "text prompts; the sample has what the last event held however the stream ends"
    ),
    "slime.rollout.sleep_rollout.sleep": Verdict("works", "an async function; ctrl-C ends the run"),
    "slime.utils.arguments": Verdict("refused", "slime_core.config"),
    "slime.utils.async_utils.AsyncLoopThread": Verdict("works", "same arguments, same answer"),
    "slime.utils.async_utils.get_async_loop": Verdict("works", "same arguments, same answer"),
    "slime.utils.async_utils.run": Verdict("works", "run inside run is an error, not a deadlock"),
    "slime.utils.data.Dataset": Verdict("differs", "images are paths or data: URLs; an epoch's order is slime_core's"),
    "slime.utils.data.read_file": Verdict("works", "same arguments, same answer"),
    "slime.utils.distributed_utils": Verdict("refused", "slime_core.ops"),
    "slime.utils.dp_schedule": Verdict("refused", "slime_core.learning.packing"),
    "slime.utils.eval_config.EvalDatasetConfig": Verdict("differs", "slime_core.config.EvalDataset"),
    "slime.utils.flops_utils": Verdict("refused", "slime_core.ops.flops"),
    "slime.utils.health_monitor": Verdict("refused", "servers are watched and started again by themselves"),
    "slime.utils.http_utils.find_available_port": Verdict("works", "same arguments, same answer"),
    "slime.utils.http_utils.get": Verdict("differs", "as post"),
    "slime.utils.http_utils.get_host_info": Verdict("works", "same arguments, same answer"),
    "slime.utils.http_utils.get_rollout_num_engines": Verdict(
        "differs", "those of --rollout-external-engine-addrs, else one"
    ),
    "slime.utils.http_utils.init_http_client": Verdict("works", "a client per event loop, made when first used"),
    "slime.utils.http_utils.is_port_available": Verdict("works", "same arguments, same answer"),
    "slime.utils.http_utils.post": Verdict(
        "differs", "one deadline for all attempts; only what may pass is tried again"
    ),
    "slime.utils.http_utils.run_router": Verdict("refused", "--rollout-engine sglang starts one"),
    "slime.utils.http_utils.terminate_process": Verdict("works", "same arguments, same answer"),
    "slime.utils.logging_utils": Verdict("refused", "--custom-rollout-log-function-path, or a hook"),
    "slime.utils.mask_utils.MultiTurnLossMaskGenerator": Verdict(
        "differs", "one algorithm for all tokenizer types; a template that rewrites earlier turns is refused"
    ),
    "slime.utils.metric_utils.compute_pass_rate": Verdict("works", "same arguments, same answer"),
    "slime.utils.metric_utils.compute_rollout_step": Verdict(
        "differs", "the rollout's number always; --wandb-always-use-train-step is refused"
    ),
    "slime.utils.metric_utils.compute_statistics": Verdict("works", "nothing for no values"),
    "slime.utils.metric_utils.dict_add_prefix": Verdict("works", "same arguments, same answer"),
    "slime.utils.metric_utils.has_repetition": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.Box": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.SingletonMeta": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.decode_int32_meta_array": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.exec_command": Verdict("refused", "subprocess.run"),
    "slime.utils.misc.get_current_node_ip": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.get_free_port": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.group_by": Verdict("works", "same arguments, same answer"),
    "slime.utils.misc.load_function": Verdict("differs", "also file.py:fn; what is missing is a PluginError"),
    "slime.utils.misc.should_run_periodic_action": Verdict("works", "same arguments, same answer"),
    "slime.utils.ppo_utils.calculate_log_probs_and_entropy": Verdict(
        "works", "in slime's own trainers a process group of None is none"
    ),
    "slime.utils.ppo_utils.chunked_discounted_returns": Verdict("works", "slime_core.ops"),
    "slime.utils.ppo_utils.chunked_gae": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.compute_approx_kl": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.compute_cispo_loss": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.compute_entropy_from_logits": Verdict("works", "as calculate_log_probs_and_entropy"),
    "slime.utils.ppo_utils.compute_gspo_kl": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.compute_log_probs": Verdict("works", "as calculate_log_probs_and_entropy"),
    "slime.utils.ppo_utils.compute_opsm_mask": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.compute_policy_loss": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.get_advantages_and_returns": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.get_advantages_and_returns_batch": Verdict(
        "differs", "slime_core.ops, without process groups"
    ),
    "slime.utils.ppo_utils.get_grpo_returns": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.ppo_utils.get_reinforce_plus_plus_baseline_advantages": Verdict(
        "differs", "slime_core.ops, without process groups"
    ),
    "slime.utils.ppo_utils.get_reinforce_plus_plus_returns": Verdict(
        "differs", "slime_core.ops; a fully masked response has zeros"
    ),
    "slime.utils.ppo_utils.vanilla_gae": Verdict("differs", "slime_core.ops, without process groups"),
    "slime.utils.processing_utils.build_processor_kwargs": Verdict("works", "same arguments, same answer"),
    "slime.utils.processing_utils.encode_image_for_rollout_engine": Verdict("works", "same arguments, same answer"),
    "slime.utils.processing_utils.load_processor": Verdict("works", "same arguments, same answer"),
    "slime.utils.processing_utils.load_tokenizer": Verdict("works", "same arguments, same answer"),
    "slime.utils.processing_utils.process_vision_info": Verdict("refused", "--multimodal-keys"),
    "slime.utils.seqlen_balancing": Verdict("refused", "slime_core.learning.packing"),
    "slime.utils.trace_utils.TraceHandle": Verdict("works", "made by bind_trace or import_trace"),
    "slime.utils.trace_utils.TraceSpanContext": Verdict("works", "set, update; what trace_span yields"),
    "slime.utils.trace_utils.bind_trace": Verdict("works", "same arguments, same answer"),
    "slime.utils.trace_utils.build_sglang_meta_trace_attrs": Verdict(
        "works", "an answer without finish_reason is taken as well"
    ),
    "slime.utils.trace_utils.export_trace": Verdict("works", "same arguments, same answer"),
    "slime.utils.trace_utils.import_trace": Verdict("works", "same arguments, same answer"),
    "slime.utils.trace_utils.trace_event": Verdict("works", "same arguments, same answer"),
    "slime.utils.trace_utils.trace_function": Verdict(
        "differs", "a parameter name that the function does not have is an error at once"
    ),
    "slime.utils.trace_utils.trace_next_attempt": Verdict("works", "same arguments, same answer"),
    "slime.utils.trace_utils.trace_span": Verdict(
        "works", "errors of a user's own target_getter or attrs_getter are raised"
    ),
    "slime.utils.types.RolloutBatch": Verdict("works", "a dictionary"),
    "slime.utils.types.Status": Verdict("works", "Sample.Status"),
    "slime.utils.types.Sample": Verdict("works", "slime_core.Sample"),
    "slime.utils.wandb_utils": Verdict("refused", "a hook slime_rollout_end or slime_step_end"),
}
