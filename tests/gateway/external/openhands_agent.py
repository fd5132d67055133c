"""An agent of the OpenHands SDK with its terminal tool, as its documentation has it."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

llm = LLM(
  model='openai/m2jax',
  base_url=os.environ['OPENAI_BASE_URL'],
  api_key=os.environ['OPENAI_API_KEY'],
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
