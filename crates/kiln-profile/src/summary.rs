//! A trace as tables: by kernel, by Burn operation, by what the host did.
//!
//! A kernel's time is shared among the operations it fuses in proportion to their work. What one operation
//! costs inside a fused kernel cannot be measured without taking the kernel apart; the share says where to
//! look.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::event::{Category, EventKind, OperationShare, Trace};

/// Rows that `Display` prints of each table.
const SHOWN: usize = 25;

/// Where the time of a profile went. `Display` prints tables; serde has all rows.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Time from opening the profile to the summary.
    pub seconds: f64,
    /// Runs of compiled steps.
    pub runs: u64,
    /// Time in them.
    pub run_seconds: f64,
    /// Kernels, slowest first.
    pub kernels: Vec<KernelRow>,
    /// Burn operations, those with the largest share of time first.
    pub operations: Vec<OperationRow>,
    /// What the host did, longest first. Nested events count in each.
    pub host: Vec<HostRow>,
}

/// A kernel of a step.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KernelRow {
    /// Name of the region.
    pub region: String,
    /// Which executable of the process.
    pub step: u64,
    /// The kernel's number in it.
    pub kernel: u32,
    /// Its name.
    pub name: String,
    /// Its phase; empty if unknown.
    pub phase: String,
    /// What it fuses: mnemonics in order.
    pub fused: String,
    /// Times it ran.
    pub calls: u64,
    /// Time in it.
    pub seconds: f64,
    /// Share of the time of all kernels, from 0 to 1.
    pub share: f64,
    /// Bytes of one call.
    pub bytes: u64,
    /// Floating point operations of one call.
    pub flops: u64,
}

/// A Burn operation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct OperationRow {
    /// The Burn operation, or the primitive where no operation is known.
    pub operation: String,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// Runs of steps that it was a part of, and its eager runs. Calls of one operation at one line are one in
    /// a run of a step.
    pub calls: u64,
    /// Its share of its kernels' time, and the time of its eager runs.
    pub seconds: f64,
    /// Share of the time of all kernels and eager operations, from 0 to 1.
    pub share: f64,
}

/// Work of the host.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HostRow {
    /// The category's name.
    pub category: String,
    /// The event.
    pub name: String,
    /// How often.
    pub calls: u64,
    /// How long in all.
    pub seconds: f64,
}

const NANO: f64 = 1e-9;

pub(crate) fn summarise(trace: &Trace) -> Summary {
    let mut kernels: BTreeMap<(u64, u32), KernelRow> = BTreeMap::new();
    let mut operations: BTreeMap<Operation, (u64, f64)> = BTreeMap::new();
    for run in &trace.runs {
        // The primitives of an operation are one call of it, in however many kernels.
        let mut called: BTreeSet<Operation> = BTreeSet::new();
        for time in run.kernels.iter().filter(|time| time.thread == 0) {
            let Some(kernel) = run.step.kernels.get(time.kernel as usize) else {
                continue;
            };
            let seconds = (time.end - time.begin) as f64 * NANO;
            let row = kernels
                .entry((run.step.number, time.kernel))
                .or_insert_with(|| KernelRow {
                    region: run.step.region.clone(),
                    step: run.step.number,
                    kernel: time.kernel,
                    name: kernel.name.clone(),
                    phase: kernel.phase.to_owned(),
                    fused: kernel
                        .operations
                        .iter()
                        .map(|it| &*it.op)
                        .collect::<Vec<_>>()
                        .join(" "),
                    calls: 0,
                    seconds: 0.0,
                    share: 0.0,
                    bytes: kernel.bytes,
                    flops: kernel.flops,
                });
            row.calls += 1;
            row.seconds += seconds;
            let whole: u64 = kernel.operations.iter().map(|it| it.weight.max(1)).sum();
            for part in &kernel.operations {
                let key = (
                    part.operation.clone().unwrap_or_else(|| part.op.clone()),
                    part.gradient_of.clone(),
                    part.location.clone(),
                );
                let is_first = called.insert(key.clone());
                let entry = operations.entry(key).or_default();
                entry.0 += u64::from(is_first);
                entry.1 += seconds * part.weight.max(1) as f64 / whole as f64;
            }
        }
    }
    let mut host: BTreeMap<(&str, &str), HostRow> = BTreeMap::new();
    for event in &trace.events {
        let EventKind::Slice(length) = event.kind else {
            continue;
        };
        let seconds = length as f64 * NANO;
        if event.category == Category::Eager {
            let entry = operations
                .entry((event.name.to_string(), None, None))
                .or_default();
            entry.0 += 1;
            entry.1 += seconds;
            continue;
        }
        let row = host
            .entry((event.category.name(), &event.name))
            .or_insert_with(|| HostRow {
                category: event.category.name().to_owned(),
                name: event.name.to_string(),
                calls: 0,
                seconds: 0.0,
            });
        row.calls += 1;
        row.seconds += seconds;
    }
    let run_seconds = total(trace.runs.iter().map(|run| (run.end - run.begin) as f64 * NANO));
    tables(
        trace,
        run_seconds,
        kernels.into_values(),
        operations,
        host.into_values(),
    )
}

/// A Burn operation, the forward operation whose gradient it belongs to, and its line.
type Operation = (String, Option<String>, Option<String>);

/// Sorts the rows and computes shares.
fn tables(
    trace: &Trace,
    run_seconds: f64,
    kernels: impl Iterator<Item = KernelRow>,
    operations: BTreeMap<Operation, (u64, f64)>,
    host: impl Iterator<Item = HostRow>,
) -> Summary {
    let mut kernels: Vec<KernelRow> = kernels.collect();
    let whole: f64 = kernels.iter().map(|row| row.seconds).sum();
    kernels
        .iter_mut()
        .for_each(|row| row.share = share(row.seconds, whole));
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let whole: f64 = operations.values().map(|(_, seconds)| seconds).sum();
    let mut operations: Vec<OperationRow> = operations
        .into_iter()
        .map(
            |((operation, gradient_of, location), (calls, seconds))| OperationRow {
                operation,
                gradient_of,
                location,
                calls,
                seconds,
                share: share(seconds, whole),
            },
        )
        .collect();
    operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let mut host: Vec<HostRow> = host.collect();
    host.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Summary {
        seconds: (trace.end - trace.begin) as f64 * NANO,
        runs: trace.runs.len() as u64,
        run_seconds,
        kernels,
        operations,
        host,
    }
}

/// The sum of some seconds. That of none is 0, where [`Iterator::sum`] has -0.
pub(crate) fn total(seconds: impl Iterator<Item = f64>) -> f64 {
    seconds.fold(0.0, |sum, seconds| sum + seconds)
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

impl KernelRow {
    /// Bytes a second, in units of 10^9.
    pub fn gigabytes_per_second(&self) -> f64 {
        share(self.bytes as f64 * self.calls as f64 * NANO, self.seconds)
    }

    /// Floating point operations a second, in units of 10^9.
    pub fn gigaflops(&self) -> f64 {
        share(self.flops as f64 * self.calls as f64 * NANO, self.seconds)
    }
}

impl fmt::Display for OperationShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.op)?;
        let gradient = self
            .gradient_of
            .as_ref()
            .map(|forward| format!("gradient of `{forward}`"));
        let words: Vec<&str> = [
            self.operation.as_deref(),
            gradient.as_deref(),
            self.location.as_deref(),
        ]
        .into_iter()
        .flatten()
        .collect();
        if words.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", words.join(" "))
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:.3} s, of which {:.3} s in {} runs of compiled steps",
            self.seconds, self.run_seconds, self.runs
        )?;
        if !self.kernels.is_empty() {
            writeln!(f, "\nby kernel{}", shown(self.kernels.len()))?;
            writeln!(
                f,
                "{:>6} {:>10} {:>7} {:>9} {:>7} {:>8}  {:9} kernel: fused operations",
                "share", "ms", "calls", "ms/call", "GB/s", "GFLOP/s", "phase"
            )?;
        }
        for row in self.kernels.iter().take(SHOWN) {
            writeln!(
                f,
                "{:>5.1}% {:>10.3} {:>7} {:>9.4} {:>7.1} {:>8.1}  {:9} {}: {}",
                row.share * 100.0,
                row.seconds * 1e3,
                row.calls,
                row.seconds * 1e3 / row.calls as f64,
                row.gigabytes_per_second(),
                row.gigaflops(),
                row.phase,
                row.name,
                clipped(&row.fused, 80),
            )?;
        }
        if !self.operations.is_empty() {
            writeln!(f, "\nby Burn operation{}", shown(self.operations.len()))?;
            writeln!(f, "{:>6} {:>10} {:>7}  operation", "share", "ms", "calls")?;
        }
        for row in self.operations.iter().take(SHOWN) {
            let gradient = row
                .gradient_of
                .as_ref()
                .map(|forward| format!(", gradient of `{forward}`"))
                .unwrap_or_default();
            let location = row
                .location
                .as_ref()
                .map(|at| format!(" at {at}"))
                .unwrap_or_default();
            writeln!(
                f,
                "{:>5.1}% {:>10.3} {:>7}  {}{gradient}{location}",
                row.share * 100.0,
                row.seconds * 1e3,
                row.calls,
                row.operation
            )?;
        }
        if !self.host.is_empty() {
            writeln!(
                f,
                "\non the host{}\n{:>10} {:>7}  event",
                shown(self.host.len()),
                "ms",
                "calls"
            )?;
        }
        for row in self.host.iter().take(SHOWN) {
            writeln!(
                f,
                "{:>10.3} {:>7}  {} ({})",
                row.seconds * 1e3,
                row.calls,
                row.name,
                row.category
            )?;
        }
        Ok(())
    }
}

fn shown(rows: usize) -> String {
    if rows > SHOWN {
        format!(" (the first {SHOWN} of {rows})")
    } else {
        String::new()
    }
}

/// At most `length` characters.
fn clipped(text: &str, length: usize) -> String {
    match text.char_indices().nth(length) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::event::{KernelDescription, KernelTime, StepDescription, StepRun};

    #[test]
    fn an_operation_of_many_primitives_is_called_once_in_a_run() {
        let part = |op: &str, operation: &str| OperationShare {
            op: op.into(),
            operation: Some(operation.into()),
            gradient_of: None,
            location: Some("src/main.rs:3".into()),
            weight: 1,
        };
        let kernel = |operations| KernelDescription {
            operations,
            ..KernelDescription::default()
        };
        let step = Arc::new(StepDescription {
            kernels: vec![
                kernel(vec![part("exp", "Softmax"), part("reduce_sum", "Softmax")]),
                kernel(vec![part("div", "Softmax"), part("mul", "Float.Mul")]),
            ],
            ..StepDescription::default()
        });
        let run = StepRun {
            step,
            row: 0,
            begin: 0,
            end: 4_000,
            kernels: [0, 1]
                .map(|kernel| KernelTime {
                    kernel,
                    thread: 0,
                    begin: 0,
                    end: 2_000,
                })
                .into(),
        };
        let trace = Trace {
            runs: vec![run; 3],
            ..Trace::default()
        };
        let rows = summarise(&trace).operations;
        let rows: Vec<(&str, u64, f64)> = rows
            .iter()
            .map(|row| (&*row.operation, row.calls, (row.seconds * 1e6).round()))
            .collect();
        assert_eq!(rows, [("Softmax", 3, 9.0), ("Float.Mul", 3, 3.0)]);
    }

    #[test]
    fn a_profile_without_runs_took_no_time() {
        let summary = summarise(&Trace::default());
        assert!(summary.run_seconds == 0.0 && summary.run_seconds.is_sign_positive());
        assert!(!summary.to_string().contains("-0"), "{summary}");
    }
}
