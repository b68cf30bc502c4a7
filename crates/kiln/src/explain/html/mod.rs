//! The report as one HTML file: style, script and data inside, nothing from the network.
//!
//! The script draws; this module assembles the file. The data is JSON in an element that browsers do not
//! run, with every `<` written as `\u003c`, so that no text of the program can end the element.

use super::report::Report;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("report.css");
const SCRIPT: &str = include_str!("report.js");

/// The page.
pub fn page(report: &Report) -> String {
    let data = serde_json::to_string(report).expect("names are strings and numbers are finite or null");
    let title = format!("kiln explain: {}", report.region);
    let parts = [
        ("@TITLE@", escaped(&title)),
        ("@STYLE@", STYLE.to_owned()),
        ("@DATA@", data.replace('<', "\\u003c")),
        ("@SCRIPT@", SCRIPT.to_owned()),
    ];
    let mut page = String::new();
    let mut rest = PAGE;
    // The parts are inserted in the order of the template, so that inserted text is not searched for marks.
    for (mark, text) in parts {
        let (before, after) = rest
            .split_once(mark)
            .expect("the template has every mark once, in this order");
        page.push_str(before);
        page.push_str(&text);
        rest = after;
    }
    page + rest
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_the_program_ends_the_data() {
        let report = Report {
            region: "</script><script>alert(1)</script> @STYLE@ @DATA@".to_owned(),
            ..Report::default()
        };
        let page = page(&report);
        assert_eq!(
            page.matches("</script>").count(),
            2,
            "one for the data, one for the script"
        );
        let start = page.find("id=\"report\">").unwrap() + "id=\"report\">".len();
        let end = start + page[start..].find("</script>").unwrap();
        let read: Report = serde_json::from_str(&page[start..end]).unwrap();
        assert_eq!(read, report);
        for network in ["http://", "https://", "src=", "@import", "url("] {
            let found = page.replace("http://www.w3.org/2000/svg", "").contains(network);
            assert!(!found, "the page refers to the network by {network}");
        }
    }
}
