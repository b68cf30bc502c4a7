//! The report of a partition, for people: saved tensors and who needs them, operations that run twice,
//! memory, time.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kiln_graph::{Graph, NodeData, Phase, TensorType, Value};

/// A value that is kept from the forward to the backward pass.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedTensor {
    /// The value, in the partitioned graph.
    pub value: Value,
    /// Element type and shape.
    pub ty: TensorType,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it leaves the step as an output as well, so that keeping it takes no memory of its own.
    pub is_output: bool,
    /// Where it comes from.
    pub origin: Origin,
    /// The operations of the backward pass (and of the optimizer) that read it, recomputed ones included.
    pub users: Vec<Origin>,
}

/// Operations of one kind that run again in the backward pass.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecomputedOperations {
    /// Mnemonic of the primitive.
    pub op: String,
    /// How many run again.
    pub count: usize,
    /// Bytes of their results, which are not kept.
    pub bytes: u64,
    /// Modelled time, in picoseconds.
    pub picoseconds: u64,
}

/// A product, with what follows from it, that runs for some of its rows at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunks {
    /// How many chunks.
    pub count: usize,
    /// Bytes of the product's result in one chunk.
    pub bytes: u64,
    /// The product.
    pub origin: Origin,
}

impl fmt::Display for Chunks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} and what follows from it run in {} chunks of rows, {} each",
            self.origin,
            self.count,
            Bytes(self.bytes)
        )
    }
}

/// What a node is and where it comes from.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Origin {
    /// Mnemonic of the primitive.
    pub op: String,
    /// The recorded operation.
    pub operation: Option<Arc<str>>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    pub gradient_of: Option<Arc<str>>,
    /// `file:line` of the user's call.
    pub location: Option<Arc<str>>,
    /// The user's module.
    pub module: Option<Arc<str>>,
}

impl Origin {
    /// The origin of `node`.
    pub fn of(node: &NodeData) -> Self {
        Self {
            op: node.op.name().to_owned(),
            operation: node.provenance.operation.clone(),
            gradient_of: node.provenance.gradient_of.clone(),
            location: node.provenance.location.clone(),
            module: node.provenance.module.clone(),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.op)?;
        if let Some(operation) = &self.operation {
            write!(f, " ({operation})")?;
        }
        if let Some(forward) = &self.gradient_of {
            write!(f, ", gradient of `{forward}`")?;
        }
        if let Some(module) = &self.module {
            write!(f, " in {module}")?;
        }
        if let Some(location) = &self.location {
            write!(f, " at {location}")?;
        }
        Ok(())
    }
}

/// What [`crate::partition`] did. `Display` prints it as a page for `explain`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Name of the graph.
    pub graph: String,
    /// Nodes of the forward pass, the backward pass (recomputed ones included) and the optimizer.
    pub nodes: [usize; 3],
    /// Kept values, largest first.
    pub saved: Vec<SavedTensor>,
    /// What runs again, the most bytes first.
    pub recomputed: Vec<RecomputedOperations>,
    /// What runs in chunks, to fit a budget.
    pub chunks: Option<Chunks>,
    /// Bytes kept, without outputs of the step and without values that exist only in chunks.
    pub saved_bytes: u64,
    /// Bytes that would be kept if the backward pass recomputed nothing.
    pub everything_bytes: u64,
    /// Modelled time of running operations again, in picoseconds.
    pub recompute_picoseconds: u64,
    /// Peak of the step's memory, if a planner was asked.
    pub peak: Option<u64>,
    /// Peak without a budget, if a planner was asked.
    pub peak_without_budget: Option<u64>,
}

impl Report {
    /// Counts the nodes of each phase.
    pub(crate) fn count(&mut self, graph: &Graph) {
        for (_, node) in graph.nodes() {
            match node.provenance.phase {
                Phase::Forward | Phase::Unknown => self.nodes[0] += 1,
                Phase::Backward => self.nodes[1] += 1,
                Phase::Optimizer => self.nodes[2] += 1,
            }
        }
    }

    /// Adds a node that runs again.
    pub(crate) fn add_recomputed(
        by_op: &mut BTreeMap<String, RecomputedOperations>,
        node: &NodeData,
        bytes: u64,
        picoseconds: u64,
    ) {
        let op = node.op.name().to_owned();
        let entry = by_op.entry(op.clone()).or_insert(RecomputedOperations {
            op,
            count: 0,
            bytes: 0,
            picoseconds: 0,
        });
        entry.count += 1;
        entry.bytes += bytes;
        entry.picoseconds += picoseconds;
    }
}

/// Kept values that differ in nothing but where in the model they are.
struct Group<'a> {
    first: &'a SavedTensor,
    count: usize,
    bytes: u64,
}

impl Report {
    /// The kept values, equal ones together, the most bytes first.
    fn groups(&self) -> Vec<Group<'_>> {
        let mut groups: Vec<Group> = Vec::new();
        for saved in &self.saved {
            let alike = |group: &&mut Group| {
                let first = group.first;
                first.ty == saved.ty
                    && first.is_output == saved.is_output
                    && first.origin == saved.origin
                    && first.users == saved.users
            };
            match groups.iter_mut().find(alike) {
                Some(group) => {
                    group.count += 1;
                    group.bytes += saved.bytes;
                }
                None => groups.push(Group {
                    first: saved,
                    count: 1,
                    bytes: saved.bytes,
                }),
            }
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.bytes));
        groups
    }
}

/// Bytes with a unit that keeps three digits.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut amount = self.0 as f64;
        let mut unit = "B";
        for next in ["KiB", "MiB", "GiB"] {
            if amount >= 1024.0 {
                amount /= 1024.0;
                unit = next;
            }
        }
        let text = if unit == "B" {
            format!("{} B", self.0)
        } else {
            format!("{amount:.1} {unit}")
        };
        f.pad(&text)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [forward, backward, optimizer] = self.nodes;
        writeln!(
            f,
            "partition of {}: {forward} forward, {backward} backward, {optimizer} optimizer nodes",
            self.graph
        )?;
        let share = 100.0 * self.saved_bytes as f64 / self.everything_bytes.max(1) as f64;
        writeln!(
            f,
            "keeps {} for the backward pass, {share:.0} % of the {} it reads",
            Bytes(self.saved_bytes),
            Bytes(self.everything_bytes)
        )?;
        for Group { first, count, bytes } in self.groups() {
            let output = if first.is_output { ", an output anyway" } else { "" };
            let times = if count == 1 {
                first.value.to_string()
            } else {
                format!("{count} x")
            };
            writeln!(
                f,
                "  {:>10}  {times} {} from {}{output}",
                Bytes(bytes),
                first.ty,
                first.origin
            )?;
            for user in first.users.iter().take(4) {
                writeln!(f, "              for {user}")?;
            }
            if first.users.len() > 4 {
                writeln!(f, "              and {} more", first.users.len() - 4)?;
            }
        }
        writeln!(
            f,
            "recomputes, in {:.3} ms by the cost model:",
            self.recompute_picoseconds as f64 * 1e-9
        )?;
        for op in &self.recomputed {
            writeln!(f, "  {:>10}  {} x {}", Bytes(op.bytes), op.count, op.op)?;
        }
        if let Some(chunks) = &self.chunks {
            writeln!(f, "{chunks}")?;
        }
        if let (Some(peak), Some(without)) = (self.peak, self.peak_without_budget) {
            writeln!(
                f,
                "peak memory {} under the budget, {} without",
                Bytes(peak),
                Bytes(without)
            )?;
        }
        Ok(())
    }
}
