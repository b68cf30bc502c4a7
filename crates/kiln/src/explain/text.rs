//! The report as text, for a terminal.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Formatter};

use super::report::{Break, Compile, Counted, Kernel, Memory, Prediction, Replay, Report, Step};

/// Kernels, saved tensors and externs that are listed; JSON and HTML have all.
const LISTED: usize = 12;

/// Lines of the program that are listed for a kernel.
const LINES: usize = 2;

/// Columns of the picture of memory over the step.
const COLUMNS: usize = 64;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let recompiles = self.compiles.iter().filter(|compile| !compile.expected).count();
        writeln!(
            f,
            "region `{}`: {} {}calls, {} compiled steps, {} graph breaks, {recompiles} recompiles",
            self.region,
            self.calls,
            // The calls of a `TrainStep` that were replayed have a line of their own.
            if self.replay.is_some() { "recorded " } else { "" },
            self.steps.len(),
            self.breaks.len(),
        )?;
        if let Some(replay) = &self.replay {
            write_replay(replay, f)?;
        }
        for graph_break in &self.breaks {
            write_break(graph_break, f)?;
        }
        for compile in self.compiles.iter().filter(|compile| !compile.expected) {
            write_compile(compile, f)?;
        }
        write_sizes(&self.compiles, f)?;
        if self.at_recompile_limit() {
            let unexpected = self.compiles.iter().rev().find(|compile| !compile.expected);
            let remedy = unexpected.and_then(|compile| compile.remedy.as_deref());
            writeln!(
                f,
                "  at the recompile limit of {}: further steps run on aot_eager, which is slower\n    {}",
                self.recompile_limit,
                match (&*self.advice, remedy) {
                    ("", Some(remedy)) => format!("likely fix: {remedy}"),
                    ("", None) => "likely fix: keep shapes and control flow the same".to_owned(),
                    (advice, _) => advice.to_owned(),
                },
            )?;
        }
        if self.calls > 0 && self.compiles.is_empty() {
            writeln!(
                f,
                "  nothing was compiled: no operation on a tensor of `Kiln` had a result that left a call\n    \
                 likely fix: put model and data on `Kiln` or `Autodiff<Kiln>`, and return what the program needs"
            )?;
        }
        for step in &self.steps {
            write_step(step, f)?;
        }
        if let Some(machine) = &self.machine {
            writeln!(
                f,
                "  machine: {:.1} GB/s from memory{}, {:.0} GFLOP/s {}",
                machine.bytes_per_second * 1e-9,
                match machine.caches.first() {
                    Some(rate) => format!(", {:.1} GB/s from the first cache", rate.bytes_per_second * 1e-9),
                    None => String::new(),
                },
                machine.flops_per_second * 1e-9,
                machine.what()
            )?;
        }
        if let Some(first) = self.predictions.first() {
            write_prediction(first, f)?;
        }
        match self.predictions.len() {
            0 | 1 => Ok(()),
            _ => write_predictions(&self.predictions, f),
        }
    }
}

fn write_replay(replay: &Replay, f: &mut Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "  {} calls recorded, {} replayed; {} recorded calls were compared with the plan and agreed",
        replay.recorded, replay.replayed, replay.proofs
    )?;
    if let Some(state) = &replay.state {
        let kib = |bytes: usize| bytes.div_ceil(1 << 10);
        write!(
            f,
            "  keeps {} KiB of parameters and statistics and {} KiB of optimizer state",
            kib(state.model_bytes),
            kib(state.optimizer_bytes)
        )?;
        if state.master_bytes > 0 {
            write!(f, " and {} KiB of a master copy", kib(state.master_bytes))?;
        }
        if state.copy_bytes > 0 {
            write!(f, " and {} KiB of copies in 16 bits", kib(state.copy_bytes))?;
        }
        match state.ranks {
            1 => writeln!(f)?,
            ranks => writeln!(f, ", the share of one of {ranks} ranks")?,
        }
    }
    for cause in &replay.causes {
        writeln!(f, "    recorded {} times: {}", cause.count, cause.name)?;
    }
    if let Some(obstacle) = &replay.obstacle {
        writeln!(f, "  recorded at every call: {obstacle}")?;
    }
    // Most tensors are state; the others say more.
    let (state, others): (Vec<&String>, Vec<&String>) = replay
        .inputs
        .iter()
        .partition(|line| line.contains("): state of "));
    others.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
    state
        .iter()
        .take(LISTED)
        .try_for_each(|line| writeln!(f, "    {line}"))?;
    if state.len() > LISTED {
        writeln!(f, "    and state of {} more places", state.len() - LISTED)?;
    }
    replay
        .results
        .iter()
        .try_for_each(|line| writeln!(f, "    {line}"))
}

fn write_break(graph_break: &Break, f: &mut Formatter<'_>) -> fmt::Result {
    write!(
        f,
        "  graph break, {} times: {}",
        graph_break.times, graph_break.reason
    )?;
    if let Some(operation) = &graph_break.operation {
        write!(f, " (result of {operation})")?;
    }
    if let Some(location) = &graph_break.location {
        write!(f, " at {location}")?;
    }
    writeln!(f, "\n    what to do: {}", graph_break.remedy)
}

fn write_compile(compile: &Compile, f: &mut Formatter<'_>) -> fmt::Result {
    write!(
        f,
        "  recompiled segment {} as step {} ({:.2} s, ran {} times): {}",
        compile.segment,
        compile.step,
        compile.seconds,
        compile.runs,
        compile.guard.as_deref().unwrap_or_default()
    )?;
    if let (Some(before), Some(after)) = (&compile.before, &compile.after) {
        write!(f, ": {before} became {after}")?;
    }
    match &compile.remedy {
        Some(remedy) => writeln!(f, "\n    what to do: {remedy}"),
        None => writeln!(f),
    }
}

/// Sizes that were absorbed, and notes on sizes, each once.
fn write_sizes(compiles: &[Compile], f: &mut Formatter<'_>) -> fmt::Result {
    let absorbed = compiles.iter().filter(|compile| compile.absorbed);
    let (count, seconds) = absorbed.fold((0, 0.0), |(count, seconds), it| (count + 1, seconds + it.seconds));
    if count > 0 {
        writeln!(
            f,
            "  {count} more sizes of these steps were planned in {:.3} s each, and nothing was compiled for them",
            seconds / f64::from(count)
        )?;
    }
    let mut said: Vec<&str> = Vec::new();
    for compile in compiles {
        for note in compile.notes.iter().filter(|note| !note.is_empty()) {
            if !said.contains(&&**note) {
                said.push(note);
            }
        }
    }
    for note in said.iter().take(LISTED) {
        writeln!(f, "  sizes: {note}")?;
    }
    match said.len().saturating_sub(LISTED) {
        0 => Ok(()),
        more => writeln!(f, "  and {more} more notes on sizes"),
    }
}

fn write_step(step: &Step, f: &mut Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "  step {} (segment {}) on {}{}: {} operations, {} nodes, {} inputs, {} outputs ({} in place), {} runtime scalars",
        step.number,
        step.segment,
        step.backend,
        if step.provisional {
            ", for one run only"
        } else {
            ""
        },
        step.operations,
        step.nodes,
        step.inputs,
        step.outputs,
        step.in_place,
        step.scalars,
    )?;
    let mean = step
        .mean_seconds()
        .map_or_else(String::new, |mean| format!(", {} each", seconds(mean)));
    writeln!(
        f,
        "    compiled in {}{}; ran {} times in {}{mean}",
        seconds(step.compile_seconds),
        if step.from_cache {
            " (from the disk cache)"
        } else {
            ""
        },
        step.runs,
        seconds(step.run_seconds),
    )?;
    for phase in &step.phases {
        write!(f, "    {:10} {:5} nodes", phase.phase, phase.nodes)?;
        match phase.kernels {
            0 => writeln!(f)?,
            kernels => writeln!(
                f,
                ", {kernels:4} kernels, {:>9}, {:8.3} GFLOP",
                bytes(phase.bytes),
                phase.flops as f64 * 1e-9
            )?,
        }
    }
    if !step.externs.is_empty() {
        writeln!(
            f,
            "    kept whole, run on burn-flex outside the compiled code: {}\n      what to do: nothing, unless times show it \
             (`kiln::profile`); then express it with other tensor operations",
            counted(&step.externs)
        )?;
    }
    if !step.exchanges.is_empty() {
        writeln!(
            f,
            "    collectives of the step, which waits for one after the other: {}\n      what to do: backend cpu, or cuda with \
             NCCL, joins them to buckets that travel beside the backward pass",
            counted(&step.exchanges)
        )?;
    }
    for line in step.details.lines() {
        writeln!(f, "    {line}")?;
    }
    if let Some(memory) = &step.memory {
        write_memory(memory, f)?;
    }
    write_saved(step, f)?;
    write_collectives(step, f)?;
    write_kernels(&step.kernels, f)
}

/// What travels between ranks: a line for each collective.
fn write_collectives(step: &Step, f: &mut Formatter<'_>) -> fmt::Result {
    let all = &step.collectives;
    if all.is_empty() {
        return Ok(());
    }
    let whole = all.iter().map(|it| it.bytes).sum();
    write!(
        f,
        "    between ranks: {} collectives, {}",
        all.len(),
        bytes(whole)
    )?;
    let measured: Vec<f64> = all.iter().filter_map(|it| it.exposed).collect();
    match measured.is_empty() {
        true => writeln!(f)?,
        false => writeln!(f, ", {} exposed", seconds(measured.iter().sum()))?,
    }
    for it in all.iter().take(LISTED) {
        write!(
            f,
            "      {:>9} {} of {} tensors, started by kernel {}, waited for by {}, {} kernels between",
            bytes(it.bytes),
            it.kind,
            it.tensors,
            it.start,
            it.wait,
            it.between
        )?;
        match it.exposed {
            Some(time) => writeln!(f, ": {} exposed", seconds(time))?,
            None => writeln!(f)?,
        }
    }
    if all.len() > LISTED {
        writeln!(f, "      and {} more", all.len() - LISTED)?;
    }
    Ok(())
}

/// A line for each number of ranks, which have as much work each as the first ones.
fn write_predictions(all: &[Prediction], f: &mut Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "    {:>6} {:>10} {:>10} {:>7} {:>12} {:>10} {:>10}",
        "ranks", "step", "exposed", "of n", "best buckets", "memory", "sharded"
    )?;
    for it in all {
        // With the best size, which the next run would choose.
        let best = it.best().copied().unwrap_or_default();
        writeln!(
            f,
            "    {:>6} {:>10} {:>10} {:>5.1} % {:>12} {:>10} {:>10}",
            it.ranks,
            seconds(best.step_seconds),
            seconds(best.exposed_seconds),
            100.0 * it.kernel_seconds / best.step_seconds.max(f64::MIN_POSITIVE),
            bytes(best.bytes),
            bytes(it.memory_bytes),
            bytes(it.sharded_bytes())
        )?;
    }
    Ok(())
}

fn write_prediction(it: &Prediction, f: &mut Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "  predicted on {} ranks that send {:.3} GB/s, {} an exchange and {} a message:",
        it.ranks,
        it.bandwidth * 1e-9,
        seconds(it.latency),
        seconds(it.message),
    )?;
    let source = match it.measured {
        true => "measured",
        false => "the shortest that this machine allows; --measure times them",
    };
    writeln!(
        f,
        "    a step takes {}: kernels {} ({source}), exposed communication {} of {}; {:.1} % of {} times one rank",
        seconds(it.step_seconds),
        seconds(it.kernel_seconds),
        seconds(it.exposed_seconds),
        seconds(it.travel_seconds),
        100.0 * it.efficiency(),
        it.ranks
    )?;
    if it.speed < 1.0 {
        writeln!(
            f,
            "    while data travels kernels run at {:.0} % of their speed: no core is left to the thread that moves it",
            100.0 * it.speed
        )?;
    }
    write!(
        f,
        "    memory of a rank: {}, of which {} are ",
        bytes(it.memory_bytes),
        bytes(it.state_bytes)
    )?;
    match it.sharded {
        true => writeln!(f, "its share of the optimizer's state")?,
        false => writeln!(
            f,
            "state of the optimizer; {} with sharded state",
            bytes(it.sharded_bytes())
        )?,
    }
    let best = it.best().map(|best| best.bytes);
    for size in &it.buckets {
        writeln!(
            f,
            "    buckets of {:>8}: {:4} of them, {:>9} exposed, step {:>9}{}",
            bytes(size.bytes),
            size.count,
            seconds(size.exposed_seconds),
            seconds(size.step_seconds),
            if Some(size.bytes) == best { "  (best)" } else { "" }
        )?;
    }
    Ok(())
}

fn write_memory(memory: &Memory, f: &mut Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "    memory: arena {}, arguments {}, new outputs {}",
        bytes(memory.arena_bytes),
        bytes(memory.input_bytes),
        bytes(memory.output_bytes)
    )?;
    let kernels = memory.in_use.len();
    if kernels < 2 || memory.arena_bytes == 0 {
        return Ok(());
    }
    let columns = kernels.min(COLUMNS);
    let bars = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let column = |column: usize| {
        let range = column * kernels / columns
            ..((column + 1) * kernels / columns).max(column * kernels / columns + 1);
        let most = memory.in_use[range].iter().max().copied().unwrap_or(0);
        bars[(most * 7).div_ceil(memory.arena_bytes).min(7) as usize]
    };
    let picture: String = (0..columns).map(column).collect();
    writeln!(f, "    arena over the step: {picture}")
}

fn write_saved(step: &Step, f: &mut Formatter<'_>) -> fmt::Result {
    if !step.saved.is_empty() {
        let whole: u64 = step.saved.iter().map(|tensor| tensor.bytes).sum();
        writeln!(
            f,
            "    kept for the backward pass: {} tensors, {}",
            step.saved.len(),
            bytes(whole)
        )?;
    }
    for tensor in step.saved.iter().take(LISTED) {
        writeln!(
            f,
            "      {:>9} {} {}, for {}",
            bytes(tensor.bytes),
            tensor.ty,
            tensor.origin,
            tensor.users.join(", ")
        )?;
    }
    if !step.recomputed.is_empty() {
        let list: Vec<String> = step
            .recomputed
            .iter()
            .map(|it| format!("{} {} ({})", it.count, it.op, bytes(it.bytes)))
            .collect();
        writeln!(f, "    computed again in the backward pass: {}", list.join(", "))?;
    }
    Ok(())
}

/// The most expensive kernels: by time if it was measured, else by bytes.
fn write_kernels(kernels: &[Kernel], f: &mut Formatter<'_>) -> fmt::Result {
    if kernels.is_empty() {
        return Ok(());
    }
    let measured = kernels.iter().any(|kernel| kernel.seconds.is_some());
    let mut order: Vec<&Kernel> = kernels.iter().collect();
    if measured {
        order.sort_by(|a, b| b.seconds.unwrap_or(0.0).total_cmp(&a.seconds.unwrap_or(0.0)));
    } else {
        order.sort_by_key(|kernel| std::cmp::Reverse(kernel.bytes));
    }
    let what = if measured { "slowest" } else { "largest" };
    writeln!(f, "    {} kernels, the {what} first:", kernels.len())?;
    for kernel in order.iter().take(LISTED) {
        write!(
            f,
            "      {:4} {:9} {:>14}",
            kernel.number, kernel.phase, kernel.name
        )?;
        if let Some(time) = kernel.seconds {
            write!(f, " {:>9}", seconds(time))?;
        }
        if let Some(share) = kernel.machine_share {
            let limit = kernel.limit.as_deref().unwrap_or("the machine");
            write!(f, " {:3.0}% of {limit}", share * 100.0)?;
        }
        writeln!(
            f,
            " {:>9} {:9.4} GFLOP  {}",
            bytes(kernel.bytes),
            kernel.flops as f64 * 1e-9,
            fused(kernel)
        )?;
    }
    Ok(())
}

/// The operations of the program that a kernel fuses, in short, and their lines, where they are known.
fn fused(kernel: &Kernel) -> String {
    let mut names: Vec<Counted> = Vec::new();
    for node in &kernel.fused {
        let name = node.operation.as_ref().unwrap_or(&node.op);
        match names.iter_mut().find(|known| known.name == *name) {
            Some(known) => known.count += 1,
            None => names.push(Counted {
                name: name.clone(),
                count: 1,
            }),
        }
    }
    let text = counted(&names);
    let mut text = match text.char_indices().nth(90) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    };
    // The forward operations whose gradients are computed there are named too.
    let mut lines: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for node in &kernel.fused {
        if let Some(line) = &node.location {
            lines.entry(line).or_default().extend(node.gradient_of.as_deref());
        }
    }
    for (position, (line, gradients)) in lines.iter().take(LINES).enumerate() {
        text += if position == 0 { " at " } else { ", " };
        text += line;
        if !gradients.is_empty() {
            let names: Vec<String> = gradients.iter().map(|name| format!("`{name}`")).collect();
            text += &format!(" (gradient of {})", names.join(", "));
        }
    }
    if lines.len() > LINES {
        text += &format!(" and {} more lines", lines.len() - LINES);
    }
    text
}

fn counted(names: &[Counted]) -> String {
    let show = |it: &Counted| match it.count {
        1 => it.name.clone(),
        count => format!("{} ({count} times)", it.name),
    };
    names.iter().map(show).collect::<Vec<_>>().join(", ")
}

fn bytes(count: u64) -> String {
    match count {
        0..=9_999 => format!("{count} B"),
        10_000..=9_999_999 => format!("{:.1} kB", count as f64 * 1e-3),
        10_000_000..=9_999_999_999 => format!("{:.1} MB", count as f64 * 1e-6),
        _ => format!("{:.1} GB", count as f64 * 1e-9),
    }
}

fn seconds(time: f64) -> String {
    match time {
        _ if time >= 1.0 => format!("{time:.2} s"),
        _ if time >= 1e-3 => format!("{:.2} ms", time * 1e3),
        _ => format!("{:.1} µs", time * 1e6),
    }
}
