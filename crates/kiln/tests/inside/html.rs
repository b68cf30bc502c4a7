//! The page of `explain`, in a browser. Skipped, with a line that says so, where there is none.

use std::path::PathBuf;
use std::process::Command;

use kiln::CompileOptions;

use super::train;

/// A Chromium, if this machine has one.
fn browser() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
    std::env::split_paths(&folders)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|path| path.is_file())
}

/// The document after its scripts have run.
fn rendered(page: &str) -> Option<String> {
    let Some(browser) = browser() else {
        println!("skipped: there is no Chromium to open the page in");
        return None;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("explain.html");
    std::fs::write(&path, page).unwrap();
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--dump-dom",
        ])
        .arg(format!(
            "--user-data-dir={}",
            folder.path().join("profile").display()
        ))
        .arg(format!("file://{}", path.display()))
        .output()
        .unwrap();
    let document = String::from_utf8_lossy(&output.stdout).into_owned();
    if document.is_empty() {
        println!(
            "skipped: the browser does not start here: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        return None;
    }
    Some(document)
}

#[test]
fn the_page_draws_itself_in_a_browser() {
    let explain = train(CompileOptions::default().with_name("page"), 5);
    let step = explain
        .report()
        .steps
        .iter()
        .find(|step| step.backend == "cpu")
        .expect("a C compiler");
    // A click on the heading of the bytes, then open the first kernel.
    let click = "<script>\
        [...document.querySelectorAll('#kernels th')].find(it => it.textContent === 'bytes').click();\
        document.querySelector('#graph .box').dispatchEvent(new MouseEvent('click'));\
        </script></body>";
    let Some(document) = rendered(&explain.to_html().replace("</body>", click)) else {
        return;
    };
    assert!(
        document.contains("data-ready=\"yes\""),
        "the script did not finish: {document}"
    );
    let table = &document[document.find("id=\"kernels\"").expect("the table of kernels")..];
    let table = &table[..table.find("</table>").unwrap()];
    assert_eq!(table.matches("<tr>").count(), 1 + step.kernels.len());
    assert!(table.contains("aria-sort=\"descending\""));
    let largest = step.kernels.iter().map(|kernel| kernel.bytes).max().unwrap();
    let first = step.kernels.iter().filter(|kernel| kernel.bytes == largest);
    let row = table.split("<tr>").nth(2).unwrap();
    assert!(
        first
            .clone()
            .any(|kernel| row.contains(&format!(">{}<", kernel.name))),
        "the first row is not the largest kernel: {row}"
    );
    assert!(
        document.matches("class=\"box").count() >= 1,
        "the graph has boxes"
    );
    let memory = step.memory.as_ref().unwrap();
    let blocks = memory
        .buffers
        .iter()
        .filter(|it| it.offset.is_some() && it.bytes > 0)
        .count();
    assert_eq!(document.matches("class=\"buffer\"").count(), blocks);
    assert!(document.contains("Region “page”"));
}
