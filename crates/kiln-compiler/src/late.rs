//! The passes between the partition and the schedule. A candidate of the partition goes through them, too,
//! before its memory is planned ([`crate::planner`]).

use kiln_graph::{Graph, TypeError};

use crate::options::Options;
use crate::policy::Policy;
use crate::{buckets, products, weights};

/// A pass; none where it changes nothing. Errors are bugs: it made an ill-typed node.
pub type Pass = fn(&Graph, &Options, &Policy) -> Result<Option<Graph>, TypeError>;

/// The passes in their order, each with the name of its stage.
pub const PASSES: [(&str, Pass); 3] = [
    ("buckets", |graph, options, _| {
        buckets::run(graph, &options.buckets, options.sums.as_deref())
    }),
    ("products", products::join),
    ("weights", weights::run),
];
