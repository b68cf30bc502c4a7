//! A trace in the Trace Event Format of Chrome, which Perfetto reads.
//!
//! One row (thread) each for the threads of the program and of the pool. A run of a compiled step is a slice
//! on the row of its caller; inside it lie the phases (runs of kernels of one phase) and inside these the
//! kernels. Arrows lead from the run to every kernel, on whatever row it is. The bytes of the arena in use
//! are a counter. Times are microseconds with three decimals: nanoseconds, exactly, so that what was nested
//! stays nested.

use std::cmp::Reverse;
use std::io::{self, Write};

use serde_json::{Map, Value, json};

use crate::event::{Category, Event, EventKind, KernelTime, StepRun, Trace};

/// The number of the process of a trace; rank `r` has `PROCESS + r`, so that the traces of several ranks can be shown
/// together.
pub const PROCESS: u32 = 1;

/// The number of a row's thread: from 1, which is the process's main thread. Thread 0 stands for none in some
/// readers.
fn thread(row: usize) -> usize {
    row + 1
}

/// An entry with what it is sorted by: its start, then the longest first, then the order in which it was
/// made.
struct Entry {
    start: u64,
    length: u64,
    fields: Map<String, Value>,
}

/// Writes `trace`.
pub(crate) fn write(trace: &Trace, mut out: impl Write) -> io::Result<()> {
    let mut writer = Writer {
        rows: trace.rows.clone(),
        process: PROCESS + trace.rank.unwrap_or(0),
        origin: trace.begin,
        entries: Vec::new(),
        flows: 0,
    };
    trace.events.iter().for_each(|event| writer.event(event));
    trace.runs.iter().for_each(|run| writer.run(run));
    writer
        .entries
        .sort_by_key(|entry| (entry.start, Reverse(entry.length)));

    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
    let process = writer.process;
    let name = trace
        .rank
        .map_or_else(|| "kiln".to_owned(), |rank| format!("kiln rank {rank}"));
    serde_json::to_writer(
        &mut out,
        &metadata("process_name", process, None, json!({"name": name})),
    )?;
    for (row, name) in writer.rows.iter().enumerate() {
        out.write_all(b",\n")?;
        serde_json::to_writer(
            &mut out,
            &metadata("thread_name", process, Some(row), json!({"name": name})),
        )?;
        out.write_all(b",\n")?;
        serde_json::to_writer(
            &mut out,
            &metadata(
                "thread_sort_index",
                process,
                Some(row),
                json!({"sort_index": row}),
            ),
        )?;
    }
    for entry in &writer.entries {
        out.write_all(b",\n")?;
        serde_json::to_writer(&mut out, &entry.fields)?;
    }
    out.write_all(b"\n]}\n")?;
    out.flush()
}

fn metadata(name: &str, process: u32, row: Option<usize>, arguments: Value) -> Value {
    json!({"name": name, "ph": "M", "pid": process, "tid": thread(row.unwrap_or(0)), "args": arguments})
}

struct Writer {
    rows: Vec<String>,
    process: u32,
    /// Time zero of the trace.
    origin: u64,
    entries: Vec<Entry>,
    /// Arrows so far; their identities.
    flows: u64,
}

impl Writer {
    fn add(
        &mut self,
        phase: &str,
        category: Category,
        name: &str,
        row: u32,
        start: u64,
        more: &[(&str, Value)],
    ) {
        let mut fields = Map::new();
        fields.insert("name".to_owned(), name.into());
        fields.insert("cat".to_owned(), category.name().into());
        fields.insert("ph".to_owned(), phase.into());
        fields.insert("ts".to_owned(), self.time(start));
        fields.insert("pid".to_owned(), self.process.into());
        fields.insert("tid".to_owned(), thread(row as usize).into());
        for (key, value) in more {
            fields.insert((*key).to_owned(), value.clone());
        }
        self.entries.push(Entry {
            start,
            length: 0,
            fields,
        });
    }

    fn slice(&mut self, category: Category, name: &str, row: u32, start: u64, length: u64, arguments: Value) {
        let duration = microseconds(length);
        self.add(
            "X",
            category,
            name,
            row,
            start,
            &[("dur", duration), ("args", arguments)],
        );
        if let Some(entry) = self.entries.last_mut() {
            entry.length = length;
        }
    }

    fn time(&self, at: u64) -> Value {
        microseconds(at.saturating_sub(self.origin))
    }

    fn event(&mut self, event: &Event) {
        let arguments: Map<String, Value> = event
            .arguments
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        let arguments = Value::Object(arguments);
        match event.kind {
            EventKind::Slice(length) => {
                self.slice(
                    event.category,
                    &event.name,
                    event.row,
                    event.start,
                    length,
                    arguments,
                );
            }
            EventKind::Instant => {
                let more = [("s", Value::from("t")), ("args", arguments)];
                self.add("i", event.category, &event.name, event.row, event.start, &more);
            }
            EventKind::Counter(value) => {
                let more = [("args", json!({"value": value}))];
                self.add("C", event.category, &event.name, event.row, event.start, &more);
            }
        }
    }

    fn run(&mut self, run: &StepRun) {
        let step = &*run.step;
        let arguments = json!({"step": step.number, "backend": step.backend, "kernels": step.kernels.len()});
        self.slice(
            Category::Step,
            &step.region,
            run.row,
            run.begin,
            run.end - run.begin,
            arguments,
        );
        self.phases(run);
        for time in &run.kernels {
            self.kernel(run, time);
        }
        for time in run.kernels.iter().filter(|time| time.thread == 0) {
            let Some(kernel) = step.kernels.get(time.kernel as usize) else {
                continue;
            };
            self.memory(run, time.begin, kernel.arena_bytes);
        }
        self.memory(run, run.end, 0);
    }

    fn memory(&mut self, run: &StepRun, at: u64, bytes: u64) {
        self.add(
            "C",
            Category::Step,
            "arena",
            run.row,
            at,
            &[("args", json!({"bytes": bytes}))],
        );
    }

    /// Runs of kernels of one phase. Kernels without phase join what is around them.
    fn phases(&mut self, run: &StepRun) {
        let mut open: Option<(&'static str, u64, u64)> = None;
        for time in run.kernels.iter().filter(|time| time.thread == 0) {
            let Some(kernel) = run.step.kernels.get(time.kernel as usize) else {
                continue;
            };
            match &mut open {
                Some((phase, _, end)) if kernel.phase.is_empty() || kernel.phase == *phase => *end = time.end,
                _ => {
                    if let Some((phase, begin, end)) = open.take() {
                        self.slice(Category::Phase, phase, run.row, begin, end - begin, json!({}));
                    }
                    if !kernel.phase.is_empty() {
                        open = Some((kernel.phase, time.begin, time.end));
                    }
                }
            }
        }
        if let Some((phase, begin, end)) = open {
            self.slice(Category::Phase, phase, run.row, begin, end - begin, json!({}));
        }
    }

    fn kernel(&mut self, run: &StepRun, time: &KernelTime) {
        let Some(kernel) = run.step.kernels.get(time.kernel as usize) else {
            return;
        };
        let row = match time.thread {
            0 => run.row,
            thread => self.worker(thread),
        };
        let fused: Vec<String> = kernel.operations.iter().map(ToString::to_string).collect();
        let arguments = json!({
            "kernel": time.kernel,
            "phase": kernel.phase,
            "fused": fused,
            "bytes": kernel.bytes,
            "flop": kernel.flops,
        });
        self.slice(
            Category::Kernel,
            &kernel.name,
            row,
            time.begin,
            time.end - time.begin,
            arguments,
        );
        self.flows += 1;
        let id = ("id", Value::from(self.flows));
        self.add(
            "s",
            Category::Step,
            "runs",
            run.row,
            run.begin,
            std::slice::from_ref(&id),
        );
        self.add(
            "f",
            Category::Step,
            "runs",
            row,
            time.begin,
            &[id, ("bp", "e".into())],
        );
    }

    fn worker(&mut self, thread: u32) -> u32 {
        let name = format!("kiln-{thread}");
        let known = self.rows.iter().position(|row| *row == name);
        let row = known.unwrap_or_else(|| {
            self.rows.push(name);
            self.rows.len() - 1
        });
        row as u32
    }
}

/// Nanoseconds as microseconds: below 2^53 nanoseconds (104 days) the decimal is exact.
fn microseconds(nanoseconds: u64) -> Value {
    json!(nanoseconds as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::event::{KernelDescription, StepDescription};

    /// A run of four kernels: forward, forward, without phase, backward; the second also on another thread.
    fn trace() -> Trace {
        let kernel = |name: &str, phase| KernelDescription {
            name: name.to_owned(),
            phase,
            arena_bytes: 64,
            ..KernelDescription::default()
        };
        let step = StepDescription {
            region: "step".to_owned(),
            kernels: vec![
                kernel("a", "forward"),
                kernel("b", "forward"),
                kernel("c", ""),
                kernel("d", "backward"),
            ],
            ..StepDescription::default()
        };
        let time = |kernel, thread, begin, end| KernelTime {
            kernel,
            thread,
            begin,
            end,
        };
        let run = StepRun {
            step: Arc::new(step),
            row: 0,
            begin: 1000,
            end: 2001,
            kernels: vec![
                time(0, 0, 1001, 1200),
                time(1, 1, 1210, 1390),
                time(1, 0, 1201, 1400),
                time(2, 0, 1401, 1500),
                time(3, 0, 1501, 2001),
            ],
        };
        Trace {
            rows: vec!["main".to_owned()],
            runs: vec![run],
            begin: 1000,
            end: 3000,
            ..Trace::default()
        }
    }

    #[test]
    fn kernels_lie_in_phases_and_phases_in_the_run() {
        let mut text = Vec::new();
        write(&trace(), &mut text).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        let slices: Vec<(&str, u64, f64, f64)> = file["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                let number = |key: &str| event[key].as_f64().unwrap();
                (
                    event["name"].as_str().unwrap(),
                    event["tid"].as_u64().unwrap(),
                    number("ts"),
                    number("dur"),
                )
            })
            .collect();
        let expected = [
            ("step", 1, 0.0, 1.001),
            ("forward", 1, 0.001, 0.499),
            ("a", 1, 0.001, 0.199),
            ("b", 1, 0.201, 0.199),
            ("b", 2, 0.21, 0.18),
            ("c", 1, 0.401, 0.099),
            ("backward", 1, 0.501, 0.5),
            ("d", 1, 0.501, 0.5),
        ];
        assert_eq!(slices, expected);
        let rows = file["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["name"] == "thread_name");
        let names: Vec<&str> = rows.filter_map(|event| event["args"]["name"].as_str()).collect();
        assert_eq!(names, ["main", "kiln-1"]);
    }

    #[test]
    fn ranks_are_processes() {
        let of = |rank| {
            let mut text = Vec::new();
            write(&Trace { rank, ..trace() }, &mut text).unwrap();
            let file: Value = serde_json::from_slice(&text).unwrap();
            let events = file["traceEvents"].as_array().unwrap().clone();
            let process = events[0]["pid"].as_u64().unwrap();
            assert!(events.iter().all(|event| event["pid"] == process));
            (process, events[0]["args"]["name"].as_str().unwrap().to_owned())
        };
        assert_eq!(of(None), (1, "kiln".to_owned()));
        assert_eq!(of(Some(0)), (1, "kiln rank 0".to_owned()));
        assert_eq!(of(Some(3)), (4, "kiln rank 3".to_owned()));
    }
}
