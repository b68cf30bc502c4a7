//! Programs that fail, by cause. A fix takes its lines away.

/// Causes, each with the programs that fail for it. Their tests pass without running, unless
/// `KILN_KNOWN=run` asks for them.
pub const KNOWN: &[(&str, &[&str])] = &[
    (
        "each length is new, and the history says not why",
        &["inputs::lengths_that_grow"],
    ),
    (
        "weights that are first used in the first call are drawn in another order",
        &["layers::weights_drawn_in_the_first_call"],
    ),
    (
        "a tensor that another thread reads while its step is compiled or run may have no value there",
        &[
            "threads::a_tensor_from_inside_the_closure_read_elsewhere",
            "threads::results_of_a_region_read_by_another_thread",
        ],
    ),
];
