//! Programs that fail, by cause. A fix takes its lines away.

/// Causes, each with the programs that fail for it. Their tests pass without running, unless
/// `KILN_KNOWN=run` asks for them.
pub const KNOWN: &[(&str, &[&str])] = &[
    (
        "each length is new, and the history says not why",
        &["inputs::lengths_that_grow"],
    ),
    (
        "a shape that does not fit at a later call",
        &["failures::a_shape_that_does_not_fit"],
    ),
    (
        "weights that are first used in the first call are drawn in another order",
        &["layers::weights_drawn_in_the_first_call"],
    ),
    (
        "a step's running statistics are current where Burn's wait: to be compared synced",
        &[
            "captured::a_teacher_with_batch_norm",
            "layers::a_convolutional_network",
            "looking::a_clone_as_record_with_batch_norm",
            "looking::a_clone_kept_with_batch_norm",
            "looking::a_record_at_every_second_call_with_batch_norm",
            "looking::merely_looking_once_with_batch_norm",
            "looking::merely_looking_with_batch_norm",
            "looking::reading_the_running_mean",
            "looking::reading_the_running_mean_synced",
            "looking::resumed_from_a_checkpoint_with_batch_norm",
            "looking::saved_and_loaded_into_another",
            "looking::saved_as_bytes_with_batch_norm",
            "looking::taken_apart_with_batch_norm",
            "looking::the_clone_runs_in_training_mode",
            "looking::the_model_moves_to_the_inner_backend_and_back",
            "looking::validation_and_checkpoint_with_batch_norm",
            "looking::validation_of_a_kept_copy",
            "looking::validation_with_batch_norm_after_every_call",
            "looking::validation_with_batch_norm_after_every_third_call",
            "looking::validation_with_batch_norm_once",
            "loops::curriculum_by_sizes",
            "loops::eager_steps_in_between",
            "loops::epochs_with_validation",
            "loops::epochs_with_validation_by_a_function",
            "loops::frozen_half_way",
            "loops::the_best_model_is_kept",
            "loops::two_models_side_by_side",
            "optimizers::a_rate_of_zero_for_a_while",
            "optimizers::adamw_with_amsgrad",
            "outputs::the_running_mean",
            "threads::a_model_with_batch_norm_validated_by_another_thread",
            "threads::another_thread_computes_all_the_while",
        ],
    ),
    ("not looked into yet", &["random::specifications"]),
];
