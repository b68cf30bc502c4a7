//! Programs that fail, by cause. A fix takes its lines away.

/// Causes, each with the programs that fail for it. Their tests pass without running, unless
/// `KILN_KNOWN=run` asks for them.
pub const KNOWN: &[(&str, &[&str])] = &[
    (
        "a change inside the closure is not noticed",
        &[
            "captured::a_branch_on_a_counter",
            "captured::a_number_in_a_cell_that_changes",
            "captured::a_target_network_exchanged_once",
        ],
    ),
    (
        "a failed call poisons running statistics",
        &[
            "failures::a_panic_after_the_forward_pass_of_batch_norm",
            "failures::a_panic_and_then_validation",
            "failures::a_panic_at_the_first_call_with_batch_norm",
            "failures::a_panic_at_the_third_call_with_batch_norm",
            "failures::a_shape_that_does_not_fit",
            "failures::panics_twice_in_a_row_with_batch_norm",
        ],
    ),
    (
        "a host read inside the closure is not noticed",
        &[
            "captured::a_mask_from_lengths_read_on_the_host",
            "outputs::a_count_from_the_batch",
        ],
    ),
    (
        "an abandoned trace has taken random streams",
        &["regions::a_tracked_function_that_reads_after_dropout"],
    ),
    (
        "an abandoned trace leaves running statistics without a value",
        &["regions::a_tracked_function_that_reads_with_batch_norm"],
    ),
    (
        "an output that the step does not compute is what it was",
        &[
            "inputs::a_tracked_input",
            "outputs::a_vector_of_inputs_and_results",
            "outputs::a_weight",
            "outputs::a_weight_twice",
            "outputs::an_input_among_several",
            "outputs::an_input_that_is_not_used",
            "outputs::logits_twice",
            "outputs::logits_twice_and_nested",
            "outputs::outputs_kept_over_calls",
            "outputs::the_detached_loss",
            "outputs::the_input",
            "outputs::the_input_twice",
            "outputs::the_loss_twice",
        ],
    ),
    (
        "inputs that coincided when recorded stay one",
        &[
            "inputs::the_batch_is_captured_too",
            "inputs::the_same_tensor_twice_then_two",
            "inputs::the_weight_as_input",
            "inputs::three_inputs_of_which_others_coincide",
        ],
    ),
    (
        "recorded at every call without a reason",
        &[
            "inputs::coincidence_that_alternates",
            "inputs::lengths_that_grow",
            "inputs::sizes_that_alternate",
            "looking::the_optimizer_at_every_call",
        ],
    ),
    (
        "running statistics that the program sees are frozen",
        &[
            "captured::a_teacher_with_batch_norm",
            "looking::a_clone_kept_with_batch_norm",
            "looking::merely_looking_once_with_batch_norm",
            "looking::merely_looking_with_batch_norm",
            "looking::reading_the_running_mean",
            "looking::reading_the_running_mean_synced",
            "looking::resumed_from_a_checkpoint_with_batch_norm",
            "looking::taken_apart_with_batch_norm",
            "looking::the_model_moves_to_the_inner_backend_and_back",
            "outputs::the_running_mean",
        ],
    ),
    (
        "state that the program took is an error that stays",
        &[
            "captured::a_centre_in_a_cell_that_is_replaced",
            "looking::a_clone_as_record_with_batch_norm",
            "looking::saved_and_loaded_into_another",
            "looking::saved_as_bytes_with_batch_norm",
            "looking::the_clone_runs_in_training_mode",
            "looking::validation_and_checkpoint_with_batch_norm",
            "looking::validation_of_a_kept_copy",
            "looking::validation_with_batch_norm_after_every_third_call",
            "looking::validation_with_batch_norm_once",
        ],
    ),
    (
        "state that the program took: never replayed again",
        &[
            "looking::a_record_at_every_second_call_with_batch_norm",
            "looking::validation_with_batch_norm_after_every_call",
        ],
    ),
    (
        "tensors that the closure keeps elsewhere",
        &[
            "captured::a_captured_tensor_that_is_dropped",
            "captured::a_centre_in_a_cell_kept_outside",
            "captured::a_list_of_losses_in_a_cell",
        ],
    ),
    ("several of these causes, at random", &["random::specifications"]),
];
