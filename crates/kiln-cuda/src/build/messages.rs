//! NVRTC's messages with the lines of the source that they name.

use std::fmt::Write;

/// How many messages are shown: the first error causes most of the later ones.
const SHOWN: usize = 5;

/// The errors of `log`, each with the line of `text` that it names: NVRTC writes `name(12): error: what`.
pub(super) fn excerpt(log: &str, name: &str, text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut shown = String::new();
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("error")).collect();
    for message in errors.iter().take(SHOWN) {
        let _ = writeln!(shown, "{message}");
        let number = message
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('(')?.split(')').next()?.parse::<usize>().ok());
        if let Some((number, line)) =
            number.and_then(|number| Some((number, lines.get(number.checked_sub(1)?)?)))
        {
            let _ = writeln!(shown, "{number:>6} | {line}");
        }
    }
    if errors.len() > SHOWN {
        let _ = writeln!(shown, "and {} more", errors.len() - SHOWN);
    }
    if shown.is_empty() {
        shown.push_str(log);
    }
    shown.truncate(shown.trim_end().len());
    shown
}

#[cfg(test)]
mod tests {
    use super::excerpt;

    #[test]
    fn a_message_has_its_line_below() {
        let log =
            "k(2): error: identifier \"y\" is undefined\n      x = y;\n          ^\n\n1 error detected\n";
        let text = "void k() {\n  x = y;\n}";
        assert_eq!(
            excerpt(log, "k", text),
            "k(2): error: identifier \"y\" is undefined\n     2 |   x = y;\n1 error detected"
        );
    }

    #[test]
    fn a_log_without_errors_is_shown_whole() {
        assert_eq!(excerpt("ptxas died", "k", ""), "ptxas died");
    }
}
