// What stands on the page of a graph before a script fills it.
#include "serried/graph/text/page.h"

namespace serried::graph {

const std::string_view kPageHead = R"html(<header>
<div class="head">
<h1>Captured graph</h1>
<dl class="facts" id="facts"></dl>
<div class="search" role="search">
<input id="find" type="search" placeholder="Find an op, a tensor, a shape, a group" aria-label="Find"
  aria-keyshortcuts="/" autocomplete="off" spellcheck="false">
<output id="count" for="find"></output>
<button id="previous" title="Previous (Shift+Enter)" aria-label="Previous match">&uarr;</button>
<button id="next" title="Next (Enter)" aria-label="Next match">&darr;</button>
<details class="report"><summary>Report</summary><pre>)html";

const std::string_view kPageBody = R"html(</pre></details>
</div>
</div>
<div class="phases" id="phases" role="group" aria-label="Phases that are shown"></div>
<canvas id="strip" role="img"
  aria-label="All ops from left to right: phases, collectives on their way, memory"></canvas>
</header>
<noscript>This page needs JavaScript to list the ops. It loads nothing. Without it there is the report above.</noscript>
<main>
<div class="ops">
<div class="row names" aria-hidden="true">
<span></span><span class="no">no.</span><span>op</span><span class="what">results</span>
<span class="bytes">written</span><span>given to a group</span>
</div>
<section id="list" tabindex="0" aria-label="Ops in order">
<canvas id="links" aria-hidden="true"></canvas>
<div id="space"><div id="rows"></div></div>
</section>
</div>
<aside id="details" aria-live="polite"></aside>
</main>
)html";

}  // namespace serried::graph
