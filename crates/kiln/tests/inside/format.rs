//! A strict reader of the Trace Event Format, with the rules by which Perfetto imports it.
//!
//! Perfetto is lenient: what it cannot place it drops, and counts in a table that nobody looks at. Here each
//! of these is an error:
//!
//! - an event without phase, process, thread, name or (but for metadata) time and category; times that are
//!   not numbers of microseconds;
//! - a slice (`X`) that begins inside another of its thread and ends after it;
//! - an arrow (`s`, `f`) whose end is in no slice of its thread at that time, that ends before it begins, or
//!   that has one end only;
//! - a counter (`C`) with a value that is no number; an instant (`i`) without scope; a thread without a name.

use std::collections::BTreeMap;

use serde_json::Value;

/// A slice with its place among the others.
#[derive(Clone, Debug)]
pub struct Slice {
    pub category: String,
    pub name: String,
    pub thread: u64,
    /// When it ends, in nanoseconds.
    pub end: u64,
    /// The slice around it, by position in [`Read::slices`].
    pub parent: Option<usize>,
}

/// A trace as Perfetto would show it.
#[derive(Debug, Default)]
pub struct Read {
    pub slices: Vec<Slice>,
    /// The slices at the two ends of each arrow.
    pub arrows: Vec<(usize, usize)>,
    pub counters: usize,
    pub instants: usize,
}

/// What an arrow is known by.
type ArrowKey = (String, String, u64);

#[derive(Default)]
struct Reader {
    read: Read,
    /// Slices that are open, outermost first, by thread.
    open: BTreeMap<u64, Vec<usize>>,
    begun: BTreeMap<ArrowKey, usize>,
    names: BTreeMap<u64, String>,
}

/// Reads a trace.
pub fn read(text: &str) -> Result<Read, String> {
    let file: Value = serde_json::from_str(text).map_err(|error| format!("no JSON: {error}"))?;
    let unit = file["displayTimeUnit"].as_str();
    if !matches!(unit, Some("ms" | "ns")) {
        return Err(format!("displayTimeUnit is {unit:?}"));
    }
    let events = file["traceEvents"].as_array().ok_or("no list of traceEvents")?;
    let mut reader = Reader::default();
    let (metadata, mut timed): (Vec<&Value>, Vec<&Value>) =
        events.iter().partition(|event| event["ph"] == "M");
    for event in metadata {
        reader
            .metadata(event)
            .map_err(|error| format!("{error} in {event}"))?;
    }
    // Perfetto sorts by time and leaves what is at one time in the order of the file.
    for event in &timed {
        nanoseconds(event, "ts").map_err(|error| format!("{error} in {event}"))?;
    }
    timed.sort_by_key(|event| nanoseconds(event, "ts").unwrap_or(0));
    for event in timed {
        reader
            .event(event)
            .map_err(|error| format!("{error} in {event}"))?;
    }
    match reader.begun.keys().next() {
        Some(key) => Err(format!("the arrow {key:?} has no end")),
        None => Ok(reader.read),
    }
}

/// Microseconds as nanoseconds, rounded as Perfetto does.
fn nanoseconds(event: &Value, key: &str) -> Result<u64, String> {
    match event[key].as_f64() {
        Some(time) if time >= 0.0 => Ok((time * 1000.0).round() as u64),
        _ => Err(format!("`{key}` is no number of microseconds")),
    }
}

fn text(event: &Value, key: &str) -> Result<String, String> {
    match event[key].as_str() {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(format!("`{key}` is no text")),
    }
}

fn number(event: &Value, key: &str) -> Result<u64, String> {
    let number = event[key].as_u64();
    number.ok_or_else(|| format!("`{key}` is no whole number"))
}

impl Reader {
    fn metadata(&mut self, event: &Value) -> Result<(), String> {
        let (name, thread) = (text(event, "name")?, number(event, "tid")?);
        number(event, "pid")?;
        match &*name {
            "process_name" => text(&event["args"], "name").map(drop),
            "thread_name" => match self.names.insert(thread, text(&event["args"], "name")?) {
                Some(other) => Err(format!("thread {thread} is already called {other}")),
                None => Ok(()),
            },
            "thread_sort_index" => number(&event["args"], "sort_index").map(drop),
            other => Err(format!("unknown metadata {other}")),
        }
    }

    fn event(&mut self, event: &Value) -> Result<(), String> {
        let (phase, name, category) = (text(event, "ph")?, text(event, "name")?, text(event, "cat")?);
        let (process, thread) = (number(event, "pid")?, number(event, "tid")?);
        if process == 0 || thread == 0 {
            return Err("process or thread 0, which stands for none".to_owned());
        }
        if !self.names.contains_key(&thread) {
            return Err(format!("thread {thread} has no name"));
        }
        let at = nanoseconds(event, "ts")?;
        let slices = &self.read.slices;
        let open = self.open.entry(thread).or_default();
        while open.last().is_some_and(|&slice| slices[slice].end <= at) {
            open.pop();
        }
        let enclosing = open.last().copied();
        match &*phase {
            "X" => {
                let end = at + nanoseconds(event, "dur")?;
                if let Some(outer) = enclosing.map(|slice| &slices[slice])
                    && outer.end < end
                {
                    return Err(format!("overlaps the end of {outer:?}"));
                }
                open.push(slices.len());
                self.read.slices.push(Slice {
                    category,
                    name,
                    thread,
                    end,
                    parent: enclosing,
                });
                Ok(())
            }
            "i" => {
                self.read.instants += 1;
                match event["s"].as_str() {
                    Some("t" | "p" | "g") => Ok(()),
                    scope => Err(format!("the scope is {scope:?}")),
                }
            }
            "C" => {
                self.read.counters += 1;
                let values = event["args"].as_object().ok_or("a counter without values")?;
                match values.values().all(Value::is_number) && !values.is_empty() {
                    true => Ok(()),
                    false => Err("a counter whose value is no number".to_owned()),
                }
            }
            "s" | "f" => {
                let key = (category, name, number(event, "id")?);
                let slice = enclosing.ok_or("an arrow with an end in no slice")?;
                if phase == "s" {
                    return match self.begun.insert(key, slice) {
                        Some(_) => Err("the arrow has two beginnings".to_owned()),
                        None => Ok(()),
                    };
                }
                if event["bp"] != "e" {
                    return Err("the arrow would end at the next slice".to_owned());
                }
                let begin = self.begun.remove(&key).ok_or("the arrow ends before it begins")?;
                self.read.arrows.push((begin, slice));
                Ok(())
            }
            other => Err(format!("unknown phase {other}")),
        }
    }
}

/// A trace of a slice from 1 to 3 µs and of `events`, on thread 1.
fn trace_with(events: &str) -> String {
    format!(
        r#"{{"displayTimeUnit": "ms", "traceEvents": [
        {{"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {{"name": "main"}}}},
        {{"name": "a", "cat": "c", "ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {{}}}}{events}]}}"#
    )
}

#[test]
fn what_perfetto_would_drop_is_an_error() {
    let event = |fields: &str| format!(r#", {{"name": "b", "cat": "c", "pid": 1, "tid": 1, {fields}}}"#);
    let read_with = |fields: &[&str]| {
        read(&trace_with(
            &fields.iter().map(|it| event(it)).collect::<String>(),
        ))
    };
    let good = read_with(&[
        r#""ph": "X", "ts": 1.5, "dur": 1.5"#,
        r#""ph": "s", "ts": 1.5, "id": 4"#,
        r#""ph": "f", "ts": 2, "id": 4, "bp": "e""#,
        r#""ph": "i", "ts": 2, "s": "t""#,
        r#""ph": "C", "ts": 2, "args": {"bytes": 3}"#,
    ]);
    let good = good.unwrap();
    assert_eq!(
        (good.slices[1].parent, &good.arrows[..]),
        (Some(0), &[(1, 1)][..])
    );
    for (bad, why) in [
        (&[r#""ph": "X", "ts": 2, "dur": 1.001"#][..], "overlaps"),
        (&[r#""ph": "X", "ts": "2", "dur": 1"#], "microseconds"),
        (&[r#""ph": "X", "ts": 2"#], "dur"),
        (&[r#""ph": "s", "ts": 2, "id": 4"#], "no end"),
        (&[r#""ph": "f", "ts": 2, "id": 4, "bp": "e""#], "before it begins"),
        (&[r#""ph": "s", "ts": 3, "id": 4"#], "in no slice"),
        (&[r#""ph": "i", "ts": 2"#], "scope"),
        (&[r#""ph": "C", "ts": 2, "args": {"bytes": "3"}"#], "no number"),
        (&[r#""ph": "B", "ts": 2"#], "unknown phase"),
    ] {
        let error = read_with(bad).expect_err(why);
        assert!(error.contains(why), "{error}");
    }
}
