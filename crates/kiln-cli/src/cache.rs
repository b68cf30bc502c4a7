//! `kiln cache`: the disk cache of compiled steps, of whatever target.

use std::time::SystemTime;

use kiln_store::{CacheFolder, Listing};

use crate::error::CliError;
use crate::show;

/// Entries of a store that are listed; a GPU's machine code has hundreds.
const LISTED: usize = 20;

/// Prints what each store of the cache holds, last used first.
///
/// # Errors
///
/// [`CliError::Cache`] if the folder cannot be read.
pub fn list() -> Result<(), CliError> {
    let cache = CacheFolder::from_env();
    let Some(folder) = cache.path() else {
        show::line("the cache is switched off");
        return Ok(());
    };
    let stores = cache.list()?;
    for store in stores.iter().filter(|store| !store.entries.is_empty()) {
        show::line(format_args!(
            "{}: {} entries, {}",
            store.store,
            store.entries.len(),
            size(store.bytes())
        ));
        for entry in store.entries.iter().take(LISTED) {
            let key = entry.key.get(..12).unwrap_or(&entry.key);
            show::line(format_args!(
                "  {key}  {:>9}  {:>8} ago  {}",
                size(entry.bytes),
                age(entry.last_used),
                entry.name()
            ));
        }
        if store.entries.len() > LISTED {
            show::line(format_args!(
                "  and {} used longer ago",
                store.entries.len() - LISTED
            ));
        }
    }
    let count: usize = stores.iter().map(|store| store.entries.len()).sum();
    let total = stores.iter().map(Listing::bytes).sum();
    show::line(format_args!(
        "{count} entries, {} in {}",
        size(total),
        folder.display()
    ));
    Ok(())
}

/// Removes everything.
///
/// # Errors
///
/// [`CliError::Cache`] if an entry cannot be removed.
pub fn clear() -> Result<(), CliError> {
    let (count, bytes) = CacheFolder::from_env().clear()?;
    show::line(format_args!("removed {count} entries, {}", size(bytes)));
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
