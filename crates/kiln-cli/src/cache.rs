//! `kiln cache`: the disk cache of compiled steps.

use std::time::SystemTime;

use kiln_cpu::Cache;

use crate::error::CliError;

/// Prints the compiled steps, last used first.
///
/// # Errors
///
/// [`CliError::Cpu`] if the folder cannot be read.
pub fn list() -> Result<(), CliError> {
    let cache = Cache::from_env();
    let Some(folder) = cache.folder() else {
        println!("the cache is switched off");
        return Ok(());
    };
    let entries = cache.list()?;
    for entry in &entries {
        let key = entry.key.get(..12).unwrap_or(&entry.key);
        println!(
            "{key}  {:>9}  {:>8} ago  {}",
            size(entry.bytes),
            age(entry.last_used),
            entry.name
        );
    }
    let total = entries.iter().map(|entry| entry.bytes).sum();
    println!("{} steps, {} in {}", entries.len(), size(total), folder.display());
    Ok(())
}

/// Removes all compiled steps.
///
/// # Errors
///
/// [`CliError::Cpu`] if an entry cannot be removed.
pub fn clear() -> Result<(), CliError> {
    let (count, bytes) = Cache::from_env().clear()?;
    println!("removed {count} steps, {}", size(bytes));
    Ok(())
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

fn age(time: SystemTime) -> String {
    let seconds = SystemTime::now()
        .duration_since(time)
        .unwrap_or_default()
        .as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
